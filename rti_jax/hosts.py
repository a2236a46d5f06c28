"""The hosts of a run: how they find each other, divide the work and tell each other what is not on a device.

One process per host runs the same program (docs/clusters.md). What follows from the config, the seed and the step is
computed by each; episodes are divided; parameters and micro-batches are global arrays. Small values travel through
the key-value store of `jax.distributed`, where no device has to take part. Whatever all must do together (collectives,
`exchange`, `collect`) is done by every process in the same order; process 0 differs only in what it writes.
"""

import atexit
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rti_jax import wire
from rti_jax.config import Config, ConfigError, HostsConfig
from rti_jax.redaction import redact
from rti_jax.watchdog import Watchdog

T = TypeVar("T")
CHUNK = 2**20  # bytes of one value in the store
POLL = 2000  # milliseconds of one wait in the store's client, during which no signal (Ctrl-C) is seen


class Hosts:
    """This process among those of the run. Alone, everything below is immediate.

    Attributes:
      index: of this process. count: of processes.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None, stall_timeout: float = 0.0):
        self.index, self.count = index, count
        self._client = client
        self._exchanges = self._collects = 0
        self._failure = 0  # exit code of the process, if it failed
        self._watchdog = Watchdog(client, index, count, stall_timeout) if client and count > 1 else None

    @property
    def first(self) -> bool:
        """True in the process that writes the run folder."""
        return self.index == 0

    @property
    def alone(self) -> bool:
        return self.count == 1

    def share(self, total: int) -> range:
        """Numbers of this host's part of `total` things; dealt in turn, as easy tasks may precede hard ones."""
        return range(self.index, total, self.count)

    @staticmethod
    def in_order(parts: Sequence[Sequence[T]]) -> list[T]:
        """All things in order, from every host's share."""
        return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]

    def exchange(self, value: T) -> list[T]:
        """Every host's value, in the order of hosts. Returns when all have called it."""
        if self.alone:
            return [value]
        self._exchanges += 1
        self._mark()
        keys = [f"hosts/exchange/{i}/{self._exchanges}" for i in range(self.count)]
        self._send(keys[self.index], value)
        values = [value if i == self.index else self._receive(key) for i, key in enumerate(keys)]
        # All are in this exchange, so that they have read the last one.
        self._client.key_value_delete(f"hosts/exchange/{self.index}/{self._exchanges - 1}")
        self._mark()
        return values

    def collect(self, value: T) -> list[T]:
        """Every host's value in process 0, in order; only its own elsewhere. Others do not wait for process 0."""
        if self.alone:
            return [value]
        self._collects += 1
        self._mark()
        if not self.first:
            self._send(f"hosts/collect/{self.index}/{self._collects}", value)
            return [value]
        values = [value]
        for i in range(1, self.count):
            values.append(self._receive(f"hosts/collect/{i}/{self._collects}"))
            self._client.key_value_delete(f"hosts/collect/{i}/{self._collects}")
        return values

    def from_first(self, function: Callable[[], T]) -> T:
        """What `function` returns in process 0, the only one that calls it. Its ConfigError is raised in all."""
        if self.alone:
            return function()
        answer, error = None, ""
        if self.first:
            try:
                answer = function()
            except ConfigError as caught:
                error = str(caught)
        answer, error = self.exchange((answer, error))[0]
        if error:
            raise ConfigError(error)
        return answer

    def at(self, place: str) -> None:
        """Says where this host is, e.g. "step 3, update", for the watchdog; every host passes the same places."""
        if self._watchdog:
            self._watchdog.mark(place)

    def living(self, told: Callable[..., None]) -> Callable[..., None]:
        """`told`, each call of which is also a sign of life, e.g. an episode that ended."""

        def call(*what) -> None:
            self.alive()
            told(*what)

        return call

    def alive(self) -> None:
        """A sign of life on the way."""
        if self._watchdog:
            self._watchdog.alive()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        """Waits for the other hosts, or tells them that this one failed."""
        if self.alone:
            return
        if error is not None:
            self._failure = 130 if kind is KeyboardInterrupt else 2 if kind is ConfigError else 1
            self._watchdog.fail(redact(" ".join(f"{kind.__name__}: {error}".split())[:300]))
            return
        import jax

        self.exchange(None)
        self._watchdog.stop()
        jax.distributed.shutdown()

    def leave(self) -> None:
        """At the process's exit: after a failure JAX's client would wait for hosts that do not come any more."""
        if self._failure:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._failure)

    def _mark(self) -> None:
        self._watchdog.mark()

    def _send(self, key: str, value: Any) -> None:
        data = wire.encode(value)
        parts = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
        self._client.key_value_set(f"{key}/parts", str(len(parts)))
        for i, part in enumerate(parts):
            self._client.key_value_set_bytes(f"{key}/{i}", part)

    def _receive(self, key: str) -> Any:
        parts = int(_wait_for(self._client.blocking_key_value_get, f"{key}/parts"))
        get = self._client.blocking_key_value_get_bytes
        return wire.decode(b"".join(_wait_for(get, f"{key}/{i}") for i in range(parts)))


def _wait_for(get: Callable[[str, int], T], key: str) -> T:
    """The value of a key, whenever it comes: the watchdog ends what waits too long."""
    while True:
        try:
            return get(key, POLL)
        except Exception as error:  # the client has no type for it
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def join(config: HostsConfig) -> Hosts:
    """Joins the other processes of the run; call it before JAX is used. Alone if `hosts.coordinator` is empty.

    Ends the process with one line on stderr and exit code 1 if the others do not come within `hosts.start_timeout`.

    Raises:
      ConfigError: with `hosts.coordinator=auto` nothing, or a part alone, was detected.
    """
    if not config.coordinator:
        return Hosts()
    import jax
    from jax._src import distributed  # the store has no public name

    address, count, index = _addresses(config)
    others = f"the {count} processes at {address}"
    print(f"process {index} on {socket.gethostname()} waits for {others}", file=sys.stderr, flush=True)
    done = threading.Event()
    threading.Thread(target=_give_up, args=(done, config.start_timeout, index, others), daemon=True).start()
    jax.distributed.initialize(
        address,
        count,
        index,
        initialization_timeout=config.start_timeout + 60,  # JAX's own end is a stack trace: ours comes before it
        cluster_detection_method="deactivate",  # detection would leave one GPU to a process; ours has all of its host
    )
    done.set()
    hosts = Hosts(index, count, distributed.global_state.client, config.stall_timeout)
    atexit.register(hosts.leave)
    return hosts


def own_servers(config: Config, hosts: Hosts) -> Config:
    """The config with this host's share of the vLLM servers: one that two hosts updated would refuse the second.

    Raises:
      ConfigError: there are fewer servers than hosts.
    """
    if hosts.alone or config.engine.kind != "server":
        return config
    urls = config.engine.urls[hosts.index :: hosts.count]
    if not urls and not config.engine.start:
        raise ConfigError(
            f"engine.urls has {len(config.engine.urls)} server(s) for {hosts.count} hosts; each needs at least one"
        )
    return config.model_copy(update={"engine": config.engine.model_copy(update={"urls": urls})})


def only_one(config: HostsConfig, command: str) -> None:
    """Raises ConfigError if a command that runs on one host is to run on several."""
    if config.coordinator:
        raise ConfigError(f"hosts.coordinator={config.coordinator}: {command} runs on one host; leave it empty")


def _addresses(config: HostsConfig) -> tuple[str, int, int]:
    """Coordinator, number of processes and this process's number, as given or as the cluster's environment has them."""
    if config.coordinator != "auto":
        return config.coordinator, config.processes, config.process_id
    from jax._src import clusters

    explicit = "give hosts.coordinator=HOST:PORT hosts.processes=N hosts.process_id=I"
    try:
        address, count, index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, config.start_timeout
        )
    except Exception as error:  # a cluster that says a part of it alone: whatever JAX makes of that
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(
            f"hosts.coordinator=auto: the cluster does not say who is who ({reason}); {explicit}"
        ) from error
    if None in (address, count, index):
        raise ConfigError(
            "hosts.coordinator=auto: neither SLURM, Open MPI (before 5), Kubernetes (JobSet) nor a TPU pod was "
            f"detected; {explicit}"
        )
    return address, count, index


def _give_up(done: threading.Event, seconds: float, index: int, others: str) -> None:
    if not done.wait(seconds):
        print(
            f"error: process {index}: {others} were not all there after {seconds:g} s (hosts.start_timeout); is the "
            "address that of process 0, is the port free and open, and was every process started?",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
