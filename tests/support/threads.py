"""Work on several threads that begin together."""

import threading


def at_once(count, work):
    """Call `work` with the numbers up to `count`, each on a thread of its own, and wait for all."""
    start = threading.Barrier(count)

    def begin(number):
        start.wait()
        work(number)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
