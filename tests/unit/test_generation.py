"""What the loop hands over to the thread that sends: nothing is lost, doubled or out of order."""

import sys
import threading

from tritonforge.generation import Delta, Outbox


def test_deltas_put_while_others_are_taken_are_neither_lost_nor_doubled():
    count, outbox, taken = 50_000, Outbox(), []
    done = threading.Event()

    def put():
        for index in range(count):
            outbox.put(Delta(index=index))
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many thread switches as can be had, at every place
    try:
        producer = threading.Thread(target=put)
        producer.start()
        while not done.is_set():
            taken += outbox.take_all()
        producer.join()
    finally:
        sys.setswitchinterval(interval)
    taken += outbox.take_all()
    assert [delta.index for delta in taken] == list(range(count))
