"""Rows in files of every format, and their loading as the flag of a command loads them."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from openrlhf.data.sources import load_rows

FLAG = "--data.dataset"
ROWS = [{"input": "a", "label": "1"}, {"input": "b", "label": "2"}, {"input": "c", "label": "3"}]


def load(spec, columns=("input",), **options):
    required = {f"--data.{column}_key": column for column in columns}
    return load_rows(str(spec), flag=FLAG, required_columns=required, **options)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path):
    path.write_text("input,label\na,1\nb,2\nc,3\n")


def write_arrow_file(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def write_arrow_stream(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "rows.jsonl": lambda path: write_lines(path, ROWS),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "lines.json": lambda path: write_lines(path, ROWS),
    "rows.csv": write_csv,
    "rows.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "file.arrow": write_arrow_file,
    "stream.arrow": write_arrow_stream,
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path),
    "saved_dict": lambda path: datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(
        path
    ),
}
