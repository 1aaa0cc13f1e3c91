"""Servers for the tests of ports. They listen on 127.0.0.1 only.

8000 speaks HTTP; 8001 answers garbage; 8002 never answers; 8003 stops in the middle of an answer; 8004
closes at once; 8005 sends back what it gets, once it has all of it.
"""

import base64
import hashlib
import http.server
import json
import os
import socket
import socketserver
import struct
import threading
import time


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def body(self):
        """The body piece by piece."""
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while length := int(self.rfile.readline(), 16):
                yield self.rfile.read(length)
                self.rfile.readline()
            self.rfile.readline()
        left = int(self.headers.get("content-length") or 0)
        while left:
            piece = self.rfile.read(min(left, 1 << 16))
            left -= len(piece)
            yield piece

    def answer(self, body, headers=()):
        self.send_response(200)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def chunk(self, piece):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.flush()

    def handle_any(self):
        path = self.path.split("?")[0]
        if path == "/sum":
            total, digest = 0, hashlib.sha256()
            for piece in self.body():
                total += len(piece)
                digest.update(piece)
            self.answer(json.dumps({"length": total, "sha256": digest.hexdigest()}).encode())
        elif path == "/big":
            mebibytes = int(self.path.split("?")[1])
            self.send_response(200)
            self.send_header("content-length", str(mebibytes << 20))
            self.end_headers()
            for _ in range(mebibytes):
                self.wfile.write(b"x" * (1 << 20))
        elif path == "/events":
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.chunk(b"data: first\n\n")
            while not os.path.exists("/tmp/go"):
                time.sleep(0.01)
            self.chunk(b"data: second\n\n")
            self.chunk(b"")
        elif path == "/trailers":
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.send_header("trailer", "x-sum")
            self.end_headers()
            self.chunk(b"body")
            self.wfile.write(b"0\r\nx-sum: 42\r\n\r\n")
        elif path == "/socket":
            self.websocket()
        elif path == "/strict":
            self.answer(b"strict", [
                ("set-cookie", "mine=1; Path=/"),
                ("set-cookie", "wide=1; Domain=localhost"),
                ("set-cookie", "shoal_port=stolen"),
                ("strict-transport-security", "max-age=1"),
                ("alt-svc", 'h3=":1"'),
                ("clear-site-data", '"*"'),
                ("service-worker-allowed", "/"),
                ("access-control-allow-origin", "*"),
                ("connection", "x-hop"),
                ("x-hop", "1"),
            ])
        else:
            body = b"".join(self.body()).decode()
            headers = [[name.lower(), value] for name, value in self.headers.items()]
            seen = {"method": self.command, "path": self.path, "headers": headers, "body": body}
            self.answer(json.dumps(seen).encode(), [("content-type", "application/json")])

    def websocket(self):
        magic = self.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("upgrade", "websocket")
        self.send_header("connection", "Upgrade")
        self.send_header("sec-websocket-accept", base64.b64encode(hashlib.sha1(magic.encode()).digest()).decode())
        self.end_headers()
        self.close_connection = True
        while True:
            head = self.rfile.read(2)
            if len(head) < 2:
                return
            kind, length = head[0] & 15, head[1] & 127
            if length == 126:
                (length,) = struct.unpack(">H", self.rfile.read(2))
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(self.rfile.read(length)))
            size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + struct.pack(">H", len(data))
            self.wfile.write(bytes([0x80 | kind]) + size + data)
            if kind == 8:
                return

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = do_OPTIONS = handle_any


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True
    request_queue_size = 1024


def garbage(connection):
    connection.recv(1 << 16)
    connection.sendall(b"\x00\xff this is no answer\r\n\r\n" * 100)


def half(connection):
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf of it")
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(1 << 16):
        pass


def echo(connection):
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    connection.sendall(b"".join(pieces))


def raw(port, behave):
    class Raw(socketserver.BaseRequestHandler):
        def handle(self):
            behave(self.request)

    threading.Thread(target=Server(("127.0.0.1", port), Raw).serve_forever, daemon=True).start()


raw(8001, garbage)
# The kernel connects; nobody ever accepts.
silent = socket.create_server(("127.0.0.1", 8002), backlog=2048)
raw(8003, half)
raw(8004, lambda connection: None)
raw(8005, echo)
Server(("127.0.0.1", 8000), Handler).serve_forever()
