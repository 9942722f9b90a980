"""The ranks of one contender of the training benchmark: they join, build and train; their memory is weighed between."""

from __future__ import annotations

from benchmarks.processes import Processes
from benchmarks.training_contenders import CONTENDERS
from benchmarks.training_place import Place, ThisMachine
from benchmarks.training_rank import Build, Join, Train, Trained


class Group(Processes):
    """The ranks of one contender. A context manager: at its end no process of it is left."""

    def __init__(
        self,
        name: str,
        ranks: int,
        size: str,
        timeout: float,
        place: Place | None = None,
        optimizer: str = "default",
    ) -> None:
        super().__init__("benchmarks.training_rank", timeout)
        self.name, self.ranks, self.size, self.optimizer = name, ranks, size, optimizer
        self.place = place or ThisMachine()
        self.contender = CONTENDERS[name]
        self.parameters = 0
        self.bytes_joined = self.bytes_built = self.bytes_peak = 0

    def start(self) -> None:
        """Processes, then process group, then model; the memory is weighed between these."""
        for variables in self.place.meeting_point(1 if self.contender.whole else self.ranks):
            self.start_process(variables | self.contender.variables, self.contender.threads)
        self.ask(
            [
                Join(self.name, rank, self.ranks, self.place.host_of(rank), self.size, self.optimizer)
                for rank in range(len(self.pipes))
            ]
        )
        self.bytes_joined = self.weigh()
        self.parameters = self.ask_all(Build(self.size))[0]
        self.bytes_built = self.weigh()

    def train(self, command: Train) -> list[Trained]:
        """Some steps that count."""
        return self.ask_watched([command] * len(self.pipes))

    def train_weighed(self, command: Train) -> int:
        """Some steps whose time does not count, because weighing takes time of its own. Returns the peak."""
        self.bytes_peak = 0
        self.ask_all(command, self._note_peak)
        return self.bytes_peak

    def _note_peak(self) -> None:
        self.bytes_peak = max(self.bytes_peak, self.weigh())
