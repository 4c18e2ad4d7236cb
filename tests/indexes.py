"""A package index on a free port, for tests of installations, and wheels of empty modules."""

import io
import threading
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


def wheel(name, version, needs=""):
    """Return a file name and a wheel of a module that contains only its version."""
    info, data = f"{name}-{version}.dist-info", io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr(f"{name}.py", f"__version__ = {version!r}\n")
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        file.writestr(f"{info}/METADATA", f"{head}{needs}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    return f"{name}-{version}-py3-none-any.whl", data.getvalue()


class Handler(BaseHTTPRequestHandler):
    """Answer /INDEX/NAME/ with links to the wheels of a package, and /INDEX/FILE with a wheel."""

    def do_GET(self):
        index, name = unquote(self.path).strip("/").split("/")
        files = self.server.wheels[index]
        if not name.endswith(".whl"):
            name = name.replace("-", "_")
            self.server.asked.add(name)
        links = [f'<a href="/{index}/{x}">{x}</a>' for x in files if x.startswith(f"{name}-")]
        body = files.get(name, "".join(links).encode())
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "text/html" if links else "application/zip")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def serving(**indexes):
    """Serve indexes, each a list of wheels; `asked` collects the names that pip requests."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.wheels, server.asked = {name: dict(x) for name, x in indexes.items()}, set()
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
