"""Drives a page in QtWebEngine, which is Chromium: `python chromium.py ADDRESS [FOLDER]`.

The Python needs PySide6 with QtWebEngine. stdin has a JSON list of JavaScript expressions. Each is evaluated
again until it is true, for SECONDS at most, and then the next one. stdout gets {"values": the value of each,
"console": messages of the page}. FOLDER gets a screenshot after each expression.
"""

import json
import os
import sys
import time

SECONDS = 60


def main() -> None:
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")  # Chromium has no sandbox for root
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--disable-gpu --disable-logging")
    from PySide6.QtCore import QUrl
    from PySide6.QtWebEngineCore import QWebEnginePage
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    console: list[str] = []

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source):
            console.append(message)

        def javaScriptAlert(self, origin, message):
            console.append(f"alert: {message}")

    application = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.setPage(Page(view))
    view.resize(1400, 900)
    view.show()

    def evaluated(expression: str):
        """Evaluates an expression once; an error in it counts as false."""
        answers: list = []
        view.page().runJavaScript(
            f"(() => {{ try {{ return {expression}; }} catch (e) {{ return null; }} }})()", 0, answers.append
        )
        while not answers:
            application.processEvents()
            time.sleep(0.01)
        return answers[0]

    view.setUrl(QUrl(sys.argv[1]))
    values = []
    for number, expression in enumerate(json.load(sys.stdin)):
        deadline = time.monotonic() + SECONDS
        while not (value := evaluated(expression)) and time.monotonic() < deadline:
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                application.processEvents()
                time.sleep(0.01)
        values.append(value)
        if len(sys.argv) > 2:
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                application.processEvents()
                time.sleep(0.01)
            view.grab().save(f"{sys.argv[2]}/{number:02d}.png")
    print(json.dumps({"values": values, "console": console}), flush=True)
    os._exit(0)  # Qt's own way to end takes seconds


if __name__ == "__main__":
    main()
