from collectives.result import Result

class Call:
    """A call that has been started: `test()` and `wait()` complete it."""

    def test(self) -> bool:
        """Return whether the call is complete, without waiting; raises what `wait()` would."""

    def wait(self) -> Result:
        """Wait until the call is complete and return its `Result`; the same one every time."""
