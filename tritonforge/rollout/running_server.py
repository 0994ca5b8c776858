"""The tritonserver that runs now, as the rollout needs it: model control with the key, a probe, and what to watch."""

from tritonforge.client import connect, generate, infer_request
from tritonforge.errors import Overloaded
from tritonforge.launch.model_control import ModelControl
from tritonforge.launch.supervisor import State, Supervisor

PROBE_TIMEOUT_S = 60.0


class RunningServer:
    """Implements rollout.Running over one supervisor, which is set once it exists."""

    supervisor: Supervisor

    def __init__(self, grpc_url: str, key: str, load_timeout_s: float) -> None:
        self._url, self._key, self._load_timeout_s = grpc_url, key, load_timeout_s

    def load(self, model: str) -> None:
        """Load a model as the repository now says; the supervisor then watches its processes as well."""
        self._check()
        with connect(self._url) as channel:
            ModelControl(channel, self._key).load(model, self._load_timeout_s)
        self.supervisor.renew_watch()

    def unload(self, model: str) -> None:
        """Unload a model."""
        self._check()
        with connect(self._url) as channel:
            ModelControl(channel, self._key).unload(model, self._load_timeout_s)

    def generate(self, model: str) -> None:
        """Generate one token."""
        with connect(self._url) as channel:
            generate(channel, infer_request(model, text="Hello", max_tokens=1), PROBE_TIMEOUT_S)

    def retire(self, number: int) -> None:
        """From now on the end of a stub of this version is no death."""
        self._check()
        self.supervisor.process.retire(number)
        self.supervisor.renew_watch()

    def kill(self, number: int) -> None:
        """End the processes of this version, which may hang; that is no death."""
        self.retire(number)
        self.supervisor.process.kill(number)

    def refuse(self, number: int) -> None:
        """Have this version refuse requests from now on, and cancel those that run."""
        self._check()
        self.supervisor.process.refuse(number)

    def _check(self) -> None:
        state = self.supervisor.state
        if state is not State.SERVING:
            raise Overloaded(f"the server is {state.value}; releases change while it serves")
