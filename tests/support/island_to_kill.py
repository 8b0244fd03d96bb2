"""An island that stops in the middle of two messages, to be killed there: one to its caller, one to whom it calls.

    python -m support.island_to_kill PORT

Its first line of output is the port at which it can be called; then come a line for each message it has begun.
"""

import sys
import threading
import time

import numpy as np

from noloco_jax.islands import frames
from support.islands import Recorder, calling, nothing, running

MESSAGE = np.zeros(4 * frames.PIECE_BYTES, np.uint8)


def first_piece_only(array):
    yield array[: frames.PIECE_BYTES]
    print("begun", flush=True)
    time.sleep(3600)


def call(port: int) -> None:
    with calling(port).exchange({}, nothing, 3600) as channel:
        channel.send({"data": True}, [MESSAGE])


def exchange(caller, hello, connect) -> None:
    channel = connect(nothing)
    channel.send({})
    channel.send({"data": True}, [MESSAGE])


def main() -> None:
    recorder = Recorder()
    recorder.exchange = exchange
    frames._pieces = first_piece_only
    with running(recorder) as server:
        print(server.port, flush=True)
        threading.Thread(target=call, args=(int(sys.argv[1]),), daemon=True).start()
        time.sleep(3600)


if __name__ == "__main__":
    main()
