"""Sources of images, and every reason to refuse one."""

import base64
import http.server
import io
import socket
import ssl
import struct
import subprocess
import threading
import zlib

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image as PILImage
from refusals import refused

from openrlhf.data import image_urls, images
from openrlhf.data.files import Part
from openrlhf.data.image_urls import fetch, public_addresses
from openrlhf.data.images import ImageSources, image_header, image_identity, load_image
from openrlhf.data.sources import load_rows
from openrlhf.errors import ErrorCode

HOST = "pictures.test"


def picture(width=40, height=20, mode="RGB", colour=None):
    return PILImage.new(mode, (width, height), colour)


def encoded(picture, format="PNG", **options):
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


PNG = encoded(picture(colour=(200, 10, 30)))


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "data"
    (root / "inside").mkdir(parents=True)
    (root / "a.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    return root


def shown(image):
    return PILImage.open(io.BytesIO(image.data))


def both(value, sources):
    """Reads an image in both ways, which must refuse it alike or agree on its size."""
    image, header = load_image(value, sources), image_header(value, sources)
    assert header == (image.reference, shown(image).height, shown(image).width)
    return image


def unusable(value, sources, code, *names):
    for read in (load_image, image_header):
        with refused(code) as told:
            read(value, sources)
        assert all(name in str(told.value) for name in names)


VALUES = {
    "path": "a.png",
    "path of a folder up and down": "inside/../a.png",
    "data": "data:image/png;base64," + base64.b64encode(PNG).decode(),
    "base64": base64.b64encode(PNG).decode(),
    "base64 with line breaks": base64.encodebytes(PNG).decode(),
    "bytes": PNG,
    "bytes of datasets": {"bytes": PNG, "path": "/etc/passwd"},
    "path of datasets": {"bytes": None, "path": "a.png"},
}


@pytest.mark.parametrize("case", VALUES)
def test_every_kind_of_value_gives_the_bytes_of_the_file(folder, case):
    image = both(VALUES[case], ImageSources(root=folder))
    assert image.data == PNG
    is_path = "path" in case
    assert image.reference == (VALUES["path"] if case in ("path", "path of datasets") else image.reference)
    assert image.reference.startswith("sha256:") is not is_path


def test_an_absolute_path_inside_the_folder(folder):
    assert both(str(folder / "a.png"), ImageSources(root=folder)).data == PNG


def test_a_picture_of_pil_becomes_a_png(folder):
    image = both(picture(7, 5, colour="blue"), ImageSources())
    assert shown(image).format == "PNG" and shown(image).getpixel((6, 4)) == (0, 0, 255)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_every_format_is_read(format):
    data = encoded(picture(31, 17), format)
    assert both(data, ImageSources()).data == data
    assert both(base64.b64encode(data).decode(), ImageSources()).data == data


@pytest.mark.parametrize("format", ["GIF", "BMP", "TIFF", "PPM"])
def test_other_formats_are_refused(format):
    unusable(encoded(picture(), format), ImageSources(), ErrorCode.UNREADABLE, "PNG, JPEG, WEBP")


def test_a_picture_that_lies_on_its_side_is_put_upright():
    lying = picture(40, 20)
    lying.paste("red", (0, 0, 10, 20))  # on the left
    exif = PILImage.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    for format in ("JPEG", "PNG", "WEBP"):
        image = both(encoded(lying, format, exif=exif), ImageSources())
        assert shown(image).size == (20, 40)
        at_the_top = np.array(shown(image))[3, 10]
        assert np.abs(at_the_top - np.array([255.0, 0, 0])).max() < 60  # the format is lossy
        assert 0x0112 not in shown(image).getexif()


def test_what_is_transparent_is_white():
    for see_through in (picture(mode="RGBA", colour=(0, 0, 0, 0)), picture(mode="LA", colour=(0, 0))):
        image = both(encoded(see_through), ImageSources())
        assert shown(image).mode == "RGB" and shown(image).getpixel((3, 3)) == (255, 255, 255)


def test_cmyk_becomes_rgb():
    image = both(encoded(picture(mode="CMYK", colour=(0, 0, 0, 255)), "JPEG"), ImageSources())
    assert shown(image).mode == "RGB" and np.array(shown(image)).max() < 10


PATHS = {
    "up": ("../secret.png", ErrorCode.INVALID_ROW),
    "absolute": ("/etc/hostname", ErrorCode.INVALID_ROW),
    "link": ("link.png", ErrorCode.INVALID_ROW),
    "link to a folder": ("up/secret.png", ErrorCode.INVALID_ROW),
    "missing": ("b.png", ErrorCode.NOT_FOUND),
    "folder": ("inside", ErrorCode.NOT_FOUND),
    "file URL": ("file:///etc/hostname", ErrorCode.UNREADABLE),
    "nothing": ("", ErrorCode.NOT_FOUND),
}


@pytest.mark.parametrize("case", PATHS)
def test_paths_stay_in_the_folder(folder, case):
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "up").symlink_to(folder.parent)
    value, code = PATHS[case]
    names = [value] if code == ErrorCode.UNREADABLE else [value, "--data.image_root"]
    unusable(value, ImageSources(root=folder), code, *names)
    unusable({"bytes": None, "path": value}, ImageSources(root=folder), code, *names)


def test_a_link_inside_the_folder_is_followed(folder):
    (folder / "inside" / "link.png").symlink_to(folder / "a.png")
    assert both("inside/link.png", ImageSources(root=folder)).data == PNG


def test_without_a_folder_no_path_is_opened(folder):
    unusable(str(folder / "a.png"), ImageSources(), ErrorCode.MISSING_FLAG, "--data.image_root")


VALUES_THAT_ARE_NONE = {
    "number": (3, ErrorCode.INVALID_ROW, "a number"),
    "empty": ({"bytes": None, "path": None}, ErrorCode.INVALID_ROW, "an object"),
    "no base64": ("data:image/png;base64,!!!", ErrorCode.INVALID_ROW, "!!!"),
    "plain data": ("data:image/svg+xml,<svg/>", ErrorCode.INVALID_ROW, "data:image/...;base64"),
    "text": (b"<html>404</html>", ErrorCode.UNREADABLE, "PNG, JPEG, WEBP"),
}


@pytest.mark.parametrize("case", VALUES_THAT_ARE_NONE)
def test_values_that_are_no_image(case):
    value, code, name = VALUES_THAT_ARE_NONE[case]
    unusable(value, ImageSources(), code, name)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_truncated_file_has_a_header_and_no_picture(format):
    noisy = PILImage.effect_noise((64, 64), 100).convert("RGB")
    data = encoded(noisy, format)
    half = data[: len(data) // 2]
    with refused(ErrorCode.UNREADABLE):
        load_image(half, ImageSources())
    if format != "WEBP":  # the header of WEBP holds the length
        assert image_header(half, ImageSources())[1:] == (64, 64)


def bomb(width, height):
    """Returns a PNG of a few bytes that declares a huge size."""
    chunk = lambda name, data: (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size, name", [((8000, 8000), "8000 x 8000"), ((60_000, 60_000), "bomb")])
def test_a_bomb_is_not_decoded(size, name):
    assert len(bomb(*size)) < 200
    unusable(bomb(*size), ImageSources(), ErrorCode.UNREADABLE, name)


def test_a_large_file_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(images, "MAX_BYTES", len(PNG) - 1)
    unusable("a.png", ImageSources(root=folder), ErrorCode.UNREADABLE, "a.png", f"{len(PNG)} bytes")
    unusable(PNG, ImageSources(), ErrorCode.UNREADABLE, f"{len(PNG)} bytes")


def test_the_identity_of_a_file_changes_with_it(folder):
    sources = ImageSources(root=folder)
    before = image_identity("a.png", sources)
    assert image_identity("a.png", sources) == before
    (folder / "a.png").write_bytes(PNG + b" ")
    assert image_identity("a.png", sources) != before
    assert image_identity(PNG, sources) == [load_image(PNG, sources).reference]


def test_tables_give_files_and_decode_nothing(tmp_path):
    """Tables give even a path that leads out of the folder."""
    (tmp_path / "secret.png").write_bytes(PNG)
    values = [
        {"one": {"bytes": PNG, "path": None}, "list": [{"bytes": bomb(60_000, 60_000), "path": None}]},
        {"one": {"bytes": None, "path": str(tmp_path / "secret.png")}, "list": []},
    ]
    features = datasets.Features({"one": datasets.Image(), "list": datasets.List(datasets.Image())})
    table = datasets.Dataset.from_list(values, features=features)
    assert list(Part.from_table("name", table).rows) == values
    pq.write_table(table.data.table, tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    for name, home in (("rows.parquet", tmp_path), ("saved", tmp_path / "saved")):
        rows = load_rows(str(tmp_path / name), flag="--data.dataset", required_columns={"k": "one"})
        assert rows[0] == values[0] and isinstance(rows[1]["one"], dict)
        assert rows.folder(1) == home
    assert load_rows(str(tmp_path / "rows.parquet"), flag="f", required_columns={})[1] == values[1]


# The web


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        match self.path:
            case "/a.png" | "/a%20b.png?x=1":
                self.answer(200, PNG)
            case "/moved":
                self.answer(302, location="/a.png")
            case "/away":
                self.answer(301, location="https://elsewhere.test/a.png")
            case "/plain":
                self.answer(302, location=f"http://{HOST}/a.png")
            case "/inside":
                self.answer(302, location="https://internal.test/a.png")
            case "/number":
                self.answer(302, location="https://127.0.0.1/a.png")
            case "/circle":
                self.answer(302, location="/circle")
            case "/page":
                self.answer(200, b"<html>")
            case _:
                self.answer(404)

    def answer(self, status, body=b"", location=None):
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Makes a certificate of HOST, signed by itself."""
    folder = tmp_path_factory.mktemp("certificate")
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN={HOST} -addext subjectAltName=DNS:{HOST} -keyout key.pem -out cert.pem".split(),
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def server(certificate, monkeypatch, tmp_path):
    """Redirects name lookups of this process: HOST has a public address, where this server answers;
    internal.test has a private one."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.asked = []
        names = {HOST: "93.184.215.14", "wrong.test": "93.184.215.14", "internal.test": "10.0.0.7"}
        resolve = lambda host, port, **_: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names[host], port))]
        connected = []

        def rerouted(address, timeout):
            connected.append(address)
            here = socket.socket()
            here.settimeout(timeout)
            here.connect(("127.0.0.1", server.server_port))
            return here

        monkeypatch.setattr(image_urls.socket, "getaddrinfo", resolve)
        monkeypatch.setattr(image_urls.socket, "create_connection", rerouted)
        server.connected = connected
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def test_a_url_is_fetched_once_from_the_address_that_was_checked(server):
    sources = ImageSources(hosts=(HOST,))
    for path in ("a.png", "moved", "a b.png?x=1"):
        image = both(f"https://{HOST}/{path}", sources)
        assert (image.reference, image.data) == (f"https://{HOST}/{path}", PNG)
    assert server.asked == ["/a.png", "/moved", "/a.png", "/a%20b.png?x=1"]
    assert set(server.connected) == {("93.184.215.14", 443)}


WEB = {
    "http": (f"http://{HOST}/a.png", "https://"),
    "ftp": (f"ftp://{HOST}/a.png", "https://"),
    "not allowed": ("https://other.test/a.png", "--data.image_hosts pictures.test"),
    "look-alike": (f"https://{HOST}.evil.test/a.png", "--data.image_hosts"),
    "user": (f"https://{HOST}@evil.test/a.png", "host evil.test"),
    "private": ("https://internal.test/a.png", "10.0.0.7"),
    "redirect to another host": (f"https://{HOST}/away", "host elsewhere.test"),
    "redirect to http": (f"https://{HOST}/plain", "https://"),
    "redirect to a private host": (f"https://{HOST}/inside", "10.0.0.7"),
    "redirect to a number": (f"https://{HOST}/number", "host 127.0.0.1"),
    "circle": (f"https://{HOST}/circle", "5 times"),
    "missing": (f"https://{HOST}/b.png", "404"),
    "no picture": (f"https://{HOST}/page", "PNG"),
    "another's certificate": ("https://wrong.test/a.png", "CERTIFICATE_VERIFY_FAILED"),
}


@pytest.mark.parametrize("case", WEB)
def test_urls_that_are_refused(server, case):
    url, name = WEB[case]
    sources = ImageSources(hosts=(HOST, "internal.test", "wrong.test"))
    with refused(ErrorCode.UNREADABLE, told=name):
        load_image(url, sources)
    if not url.startswith(f"https://{HOST}/"):
        assert server.asked == []


def test_no_host_is_allowed_unless_it_is_named(server):
    unusable(
        f"https://{HOST}/a.png", ImageSources(), ErrorCode.UNREADABLE, "--data.image_hosts pictures.test"
    )
    assert server.connected == []


def test_a_long_answer_and_a_slow_one_are_given_up(server, monkeypatch):
    url = f"https://{HOST}/a.png"
    with refused(ErrorCode.UNREADABLE, value=url, told=f"{len(PNG) - 1} bytes"):
        fetch(url, (HOST,), len(PNG) - 1)
    monkeypatch.setattr(image_urls, "TIMEOUT", 0.0)
    with refused(ErrorCode.UNREADABLE, value=url, told="0 seconds"):
        fetch(url, (HOST,), len(PNG))


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1",
     "224.0.0.1", "::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1"],
)  # fmt: skip
def test_addresses_that_are_not_public(monkeypatch, address):
    """One private address among several is enough for a refusal."""
    found = [(0, 0, 0, "", ("93.184.215.14", 443)), (0, 0, 0, "", (address, 443))]
    monkeypatch.setattr(image_urls.socket, "getaddrinfo", lambda *_, **__: found)
    with refused(ErrorCode.UNREADABLE, value=HOST, told=address):
        public_addresses(HOST)


def test_the_next_address_is_tried(monkeypatch):
    tried = []

    def refuse(address, timeout):
        tried.append(address)
        raise ConnectionRefusedError("refused")

    found = [(0, 0, 0, "", (address, 443)) for address in ("93.184.215.14", "2606:2800:21f::1")]
    monkeypatch.setattr(image_urls.socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(image_urls.socket, "create_connection", refuse)
    with refused(ErrorCode.UNREADABLE, value=f"https://{HOST}/a.png"):
        fetch(f"https://{HOST}/a.png", (HOST,), 10)
    assert tried == [("93.184.215.14", 443), ("2606:2800:21f::1", 443)]
