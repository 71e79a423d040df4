"""python http_service.py MODEL PORT: a service with POST /v1/completions and GET /health.

One thread runs the steps, another the event loop; outputs cross over once a step, together."""

import asyncio
import contextlib
import itertools
import json
import signal
import sys
import threading
from http import HTTPStatus

from stepgraph import Engine, EngineConfig, SamplingParams

MAX_BODY, MAX_REQUESTS, READ_SECONDS = 1 << 16, 256, 30.0


class Service:
    def __init__(self, engine):
        self.engine, self.ids = engine, itertools.count()
        self.listeners = {}  # request id -> writer if it streams, last output, characters sent
        self.work, self.stopping = threading.Semaphore(0), False
        self.thread = threading.Thread(target=self.run_steps)

    def run_steps(self):
        try:
            while not self.stopping:
                self.work.acquire()  # an idle service sleeps
                while not self.stopping and self.engine.has_unfinished():
                    self.loop.call_soon_threadsafe(self.deliver, self.engine.step())
        finally:  # stopped, or failed: /health says so from now on
            self.loop.call_soon_threadsafe(self.end)

    def deliver(self, outputs):
        for output in outputs:
            writer, last, sent = self.listeners.get(output.request_id, (None, None, 0))
            if writer is not None:
                text = output.text
                event = {"text": text[sent:], "finish_reason": output.finish_reason}
                writer.write(b"data: %b\n\n" % json.dumps(event).encode())
                self.listeners[output.request_id] = writer, last, len(text)
            if last is not None and output.finished and not last.done():
                last.set_result(output)

    def end(self):
        for _, last, _ in self.listeners.values():
            if not last.done():
                last.set_result(None)

    async def serve(self, host="127.0.0.1", port=8000, ready=print):
        self.loop, self.stopped = asyncio.get_running_loop(), asyncio.Event()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.loop.add_signal_handler(number, self.stopped.set)

        async def connected(reader, writer):
            with contextlib.suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
                await self.answer(reader, writer)
                await writer.drain()
            writer.close()

        sys.setswitchinterval(1e-4)  # the steps get the interpreter's lock back sooner
        self.thread.start()
        server = await asyncio.start_server(connected, host, port)
        ready(server.sockets[0].getsockname()[1])
        await self.stopped.wait()
        server.close()
        self.stopping = True
        self.work.release()
        await asyncio.to_thread(self.thread.join)  # the step under way ends, and then the answers
        if answers := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(answers, timeout=5.0)

    async def answer(self, reader, writer):
        try:
            async with asyncio.timeout(READ_SECONDS):
                first, *head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
                method, path, _ = first.split(" ")
                fields = dict(line.lower().split(":", 1) for line in head if line)
                size = int(fields.get("content-length", 0))
                if size > MAX_BODY:
                    return respond(writer, 413, error=f"bodies have at most {MAX_BODY} bytes")
                body = await reader.readexactly(size)
        except (ValueError, asyncio.LimitOverrunError) as error:
            return respond(writer, 400, error=f"malformed request: {error}")
        alive = self.thread.is_alive() and self.engine.stats()["healthy"]
        if (method, path) == ("GET", "/health"):
            return respond(writer, 200 if alive else 503, healthy=alive)
        if (method, path) != ("POST", "/v1/completions"):
            return respond(writer, 404, error="POST /v1/completions, or GET /health")
        if not alive or len(self.listeners) >= MAX_REQUESTS:
            return respond(writer, 503, error="failed or overloaded: try again later")
        request_id, last = f"http-{next(self.ids)}", self.loop.create_future()
        try:
            options = json.loads(body)
            prompt, streams = options.pop("prompt"), options.pop("stream", False) is True
            self.listeners[request_id] = writer if streams else None, last, 0
            self.engine.add_request(prompt, SamplingParams(**options), request_id)
            self.work.release()
            if streams:
                respond(writer, 200, "text/event-stream")
            gone = asyncio.create_task(reader.read(1))  # ends when the client disconnects
            await asyncio.wait((gone, last), return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return respond(writer, 400, error=f"{type(error).__name__}: {error}")
        finally:  # complete, or the client is gone: its row is free a step later
            self.listeners.pop(request_id, None)
            self.engine.abort(request_id)
        if not streams and last.done() and last.result() is None:
            respond(writer, 503, error="the service stopped before the answer was complete")
        elif not streams and last.done():
            output = last.result()
            respond(writer, 200, text=output.text, finish_reason=output.finish_reason)


def respond(writer, status, kind="application/json", **fields):
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {kind}\r\n"
    writer.write(f"{head}connection: close\r\n\r\n".encode())
    writer.write(json.dumps(fields).encode() if fields else b"")


if __name__ == "__main__":
    with Engine.from_pretrained(sys.argv[1], EngineConfig(max_num_seqs=32, threads=-1)) as engine:
        asyncio.run(Service(engine).serve(port=int(sys.argv[2])))
