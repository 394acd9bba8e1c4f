"""Many epochs of the agreement in one start of real processes, on JAX's own store; run by test_agreement.py.

Arguments: a seed, and how many epochs. What is told, by whom and when is drawn from the seed, alike in all
processes; each has its own pace, and runs ahead of the others in bursts. Prints where it stopped in each epoch.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import logging
import math
import random
import sys
import threading
import time

from tests.multiprocess.launcher import here

#: Place, seconds, and the seconds of the word before it.
MOVES = ((1, 30.0, 60.0), (2, 0.0, 30.0))
KINDS = ("told to one", "told to some", "moves", "taken back", "taken back too late", "joined by another")


@dataclasses.dataclass(frozen=True)
class Telling:
    """One process tells of a notice or takes it back, so many seconds after its turn in the schedule has come."""

    by: int
    after_s: float
    origin: str
    remaining_s: float | None  # None: takes it back
    after_word_s: float | None = None  # only once its process has heard the notice with so many seconds


def later(told: Telling, place: int, after_word_s: float) -> Telling:
    """Has it told in this place, also by a process that tells the word before it, and only after that word."""
    return dataclasses.replace(told, after_s=0.05 * place, after_word_s=after_word_s)


def schedule(seed: int, number: int, count: int) -> list[Telling]:
    """What is told in one epoch. Each kind comes once in as many epochs as there are kinds, in a random order."""
    draw = random.Random(f"{seed}/{number}")
    turn, place = divmod(number, len(KINDS))
    kinds = random.Random(f"{seed}/turn {turn}").sample(KINDS, len(KINDS))
    origin, kind = f"drill {number}", kinds[place]

    def telling(remaining_s: float | None, name: str = origin) -> Telling:
        return Telling(draw.randrange(count), draw.uniform(0, 0.02), name, remaining_s)

    match kind:
        case "told to one":
            return [telling(0.0)]
        case "told to some":
            return [telling(0.0) for _ in range(count)]
        case "moves":
            # The last word counts, and so must be told last.
            return [telling(60.0), *(later(telling(s), number, before) for number, s, before in MOVES)]
        case "taken back":
            return [telling(60.0), later(telling(None), 1, 60.0)]
        case "taken back too late":
            return [telling(0.01), dataclasses.replace(telling(None), after_s=draw.uniform(0.0, 0.03))]
        case _:
            return [telling(0.02), telling(0.0, f"{origin} too")]


class Observer:
    """Starts when the time that was told is up; notes what is dealt with."""

    def __init__(self) -> None:
        self.deadlines_s: dict[str, float] = {}
        self.words_s: dict[str, float] = {}  # what was told last, by origin
        self.dealt_with: set[str] = set()
        self.opened = 0
        self.retracted = 0

    def heard(self, event: object) -> None:
        from gracepoint.multihost.ledger import Broken, Closed, Noticed, Opened, Retracted

        match event:
            case Noticed(notice):
                self.words_s[notice.origin] = notice.remaining_s
                self.deadlines_s[notice.origin] = time.monotonic() + notice.remaining_s
            case Retracted(notice):
                self.retracted += 1
                self._end({notice.origin})
            case Opened():
                self.opened += 1
            case Closed(epoch):
                self._end(epoch.origins)
            case Broken(_, reason):
                raise AssertionError(reason)

    def _end(self, origins: frozenset[str] | set[str]) -> None:
        for origin in origins:
            self.deadlines_s.pop(origin, None)
        self.dealt_with |= origins

    def start_in_s(self, remaining_s: float = math.inf) -> float:
        return min(list(self.deadlines_s.values()), default=time.monotonic() + 60) - time.monotonic()

    def time_left_s(self) -> float:
        return 60.0

    def position(self) -> tuple[int, bool]:
        return 0, True

    def looked(self) -> None:
        pass


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    here().initialize_jax()
    from gracepoint.deadline import Deadline
    from gracepoint.multihost import Agreement, meet
    from gracepoint.settings import Settings

    seed, epochs = int(sys.argv[1]), int(sys.argv[2])
    meeting = meet(Settings())
    gang = meeting.gang
    observer = Observer()
    agreement = Agreement(meeting.store, gang, observer)
    own = random.Random(f"{seed} of {gang.process_index}")
    stopped: list[int] = []

    def say(tellings: list[Telling]) -> None:
        for telling in sorted(tellings, key=lambda t: t.after_s):
            time.sleep(telling.after_s)
            while telling.after_word_s not in (None, observer.words_s.get(telling.origin)):
                time.sleep(0.001)
            if telling.remaining_s is None:
                agreement.take_back(telling.origin, "taken back")
            else:
                agreement.tell(telling.origin, "", remaining_s=telling.remaining_s, drill=True, once=True)

    for number in range(epochs):
        faulthandler.dump_traceback_later(40, exit=True)  # a hang is one epoch's
        tellings = schedule(seed, number, gang.process_count)
        speaker = threading.Thread(target=say, args=([t for t in tellings if t.by == gang.process_index],))
        speaker.start()
        origins = {t.origin for t in tellings}
        while not origins <= observer.dealt_with:
            for _ in range(own.choice([1, 1, 1, 10, 100])):
                if agreement.arrive():
                    stopped.append(agreement.seat.ordinal)
                    agreement.confirm(agreement.seat.ordinal, deadline=Deadline.after(30, time.monotonic))
                    agreement.end_epoch()
            time.sleep(own.choice([0.0, 0.001, 0.005]))
        speaker.join()
        # A word that came when its notice was dealt with is void; the next epoch begins when all are done with it.
        gang.barrier(f"schedule/{number}", timeout_s=30)
    if gang.process_index == 0:
        agreement.tell("the end", "", remaining_s=0.0)
    while not agreement.arrive():
        time.sleep(0.001)
    stopped.append(agreement.seat.ordinal)
    gang.barrier("end", timeout_s=30)
    agreement.close()
    print("stopped", json.dumps(stopped))
    print("epochs", observer.opened, "retracted", observer.retracted)


main()
