"""Several hosts: a learner shared by two processes with uneven rows, what they tell each other, and who is stuck."""

import ast
import asyncio
import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import yaml
from fakes import FakeEngine, Lookup, call, lookup_source, lookup_task, small_config, tiny_chat
from stand_in import StandIn, forced_devices, make_config, make_groups, mesh
from two_hosts import OPTIONS, train

from rti_jax import evaluate as evaluate_lib
from rti_jax import hosts as hosts_lib
from rti_jax import select, study_worker
from rti_jax.collection import Collection
from rti_jax.config import Config, ConfigError, HostsConfig, load_config
from rti_jax.evaluate import evaluate
from rti_jax.hosts import Hosts, join, own_servers
from rti_jax.joint_scoring import JointScorer
from rti_jax.logprobs import Scorer
from rti_jax.metrics import Unrecorded
from rti_jax.roles import Roles
from rti_jax.rollout import Player
from rti_jax.watchdog import Beat, Watchdog, stuck

HERE = pathlib.Path(__file__).parent


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def pair(command, *arguments, devices=2):
    """Two processes of `command PORT INDEX *arguments`."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    env["XLA_FLAGS"] = forced_devices(devices)
    port, pipes = free_port(), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    commands = [[sys.executable, *command, str(port), str(i), *map(str, arguments)] for i in range(2)]
    return [subprocess.Popen(c, env=env, **pipes) for c in commands]


class TestTwoProcesses:
    """Five groups on one host, three on the other, on a mesh of two devices each."""

    @pytest.fixture(scope="class")
    def both(self, tmp_path_factory):
        processes = pair([str(HERE / "two_hosts.py")], tmp_path_factory.mktemp("checkpoints"))
        results = []
        for process in processes:
            out, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
            results.append(json.loads(out.splitlines()[-1]))
        return results

    @pytest.fixture(scope="class")
    def alone(self):
        """The same groups in one process, on one device."""
        return train(Hosts(), make_groups(count=8), range(8), make_config(**OPTIONS), mesh(1), None)

    @pytest.mark.slow
    def test_losses_gradients_and_counts_are_those_of_one_process(self, both, alone):
        _, history, _ = alone
        assert [r["devices"] for r in both] == [4, 4]
        packing = ("batch/microbatches", "batch/padding_fraction")  # the only ones that may differ
        for result in both:
            for got, expected in zip(result["history"], history, strict=True):
                assert got.keys() == expected.keys()
                for name in expected.keys() - set(packing):
                    assert got[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
        # a mean of the hosts' means would weigh three groups as much as five
        assert history[0]["batch/trajectories"] == 16 and history[1]["corrector/tokens"] == 0

    @pytest.mark.slow
    def test_parameters_stay_the_same_through_a_checkpoint(self, both, alone):
        kernel = np.ravel(alone[0].params["layers"]["mixer"]["kernel"])
        for result in both:
            np.testing.assert_allclose(result["kernel"], kernel, rtol=1e-5, atol=1e-6)
            assert result["shard"] == [2, 16, 8]  # restored onto its shards, half over fsdp

    @pytest.mark.slow
    def test_hosts_compute_the_same_shapes(self, both):
        assert both[0]["shapes"] == both[1]["shapes"]
        assert both[0]["history"] == both[1]["history"]

    @pytest.mark.slow
    def test_scores_that_only_one_host_asks_for(self, both, alone):
        scorer, params = Scorer(StandIn(), mesh(1), 0.8, [16]), jax.tree.map(np.asarray, alone[0].params)
        for index, calls in ((0, [3, 1]), (1, [2])):
            assert [len(s) for s in both[index]["scores"]] == calls
            for own in both[index]["scores"]:
                rows = [((1, 2 + i), (3 + index, 4, 5 + i)) for i in range(len(own))]
                for got, expected in zip(own, scorer.score(params, rows), strict=True):
                    np.testing.assert_allclose(got, expected, rtol=1e-4)

    @pytest.mark.slow
    def test_what_they_tell_each_other(self, both):
        assert [r["share"] for r in both] == [[0, 2, 4], [1, 3]]
        assert [r["exchanged"] for r in both] == [[0, 10], [0, 10]]
        assert [r["collected"] for r in both] == [[0, 1], [1]]  # all in process 0 alone
        assert [r["refusal"] for r in both] == ["only process 0 knows"] * 2


TROUBLE = """
import sys, time
from rti_jax.config import HostsConfig
from rti_jax.hosts import join
config = HostsConfig(coordinator=f"127.0.0.1:{sys.argv[1]}", processes=2, process_id=int(sys.argv[2]), stall_timeout=2)
with join(config) as hosts:
    hosts.at("step 3, rollout")
    if hosts.index == 1 and sys.argv[3] == "stuck":
        time.sleep(600)
    if hosts.index == 1:
        raise ValueError("a bug")
    hosts.exchange(None)
"""


@pytest.mark.slow
def test_a_stuck_host_is_named_and_all_end():
    processes = pair(["-c", TROUBLE], "stuck")
    for index, process in enumerate(processes):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1, errors
        line = next(text for text in errors.splitlines() if text.startswith("error:"))
        assert line.startswith("error: host 1 (") and "has not left step 3, rollout" in line
        assert "host 0 (" in line and f"this is host {index}" in line


@pytest.mark.slow
def test_a_host_that_fails_ends_the_others_with_its_reason():
    waiting, failing = pair(["-c", TROUBLE], "failing")
    own, errors = failing.communicate(timeout=120)[1], waiting.communicate(timeout=120)[1]
    assert (failing.returncode, waiting.returncode) == (1, 1), errors + own
    assert "ValueError: a bug" in own
    assert " failed in step 3, rollout: ValueError: a bug; this is host 0" in errors


class Store:
    """jax.distributed's key-value store, for hosts that are threads."""

    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, 60)
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            for gone in [k for k in self.values if k == key or k.startswith(f"{key}/")]:
                del self.values[gone]

    def key_value_dir_get(self, prefix):
        with self.changed:
            return [(k, v) for k, v in self.values.items() if k.startswith(f"{prefix}/")]

    key_value_set_bytes, blocking_key_value_get_bytes = key_value_set, blocking_key_value_get


def together(work, count=2):
    """What `work(hosts)` returns on each of `count` hosts that run at once, and their store."""
    store = Store()

    def one(index):
        with Hosts(index, count, store, stall_timeout=1e6) as hosts:
            hosts._watchdog._end = lambda line: None  # a thread's failure must not end the tests
            return work(hosts)

    with ThreadPoolExecutor(count) as pool:
        return [job.result() for job in [pool.submit(one, i) for i in range(count)]], store


class TestTogether:
    def test_exchanges_stay_apart_and_leave_nothing_behind(self):
        def work(hosts):
            return [hosts.exchange((hosts.index, i)) for i in range(20)], hosts.collect("x" * hosts.index)

        results, store = together(work, count=3)
        for exchanged, _ in results:
            assert exchanged == [[(host, i) for host in range(3)] for i in range(20)]
        assert [collected for _, collected in results] == [["", "x", "xx"], ["x"], ["xx"]]
        # of the exchanges only the last, at the end, is still there; everything collected is gone
        assert {k.split("/")[1] for k in store.values} <= {"exchange", "beats"}
        assert len([k for k in store.values if k.endswith("/parts")]) == 3

    @pytest.mark.parametrize("patience", [None, 0.01])
    def test_every_host_scores_the_same_rows_whoever_asks(self, patience):
        def work(hosts):
            calls = []

            def score(rows):
                calls.append(list(rows))
                return [np.full(len(response), 10 * prompt[0] + len(response)) for prompt, response in rows]

            async def episode(length):
                return [float((await joint([((hosts.index,), (0,) * (i + 1))]))[0][0]) for i in range(length)]

            async def episodes():
                return await asyncio.gather(*map(episode, [3, 1] if hosts.index == 0 else [2, 0]))

            async def everything():
                nonlocal joint
                joint = JointScorer(hosts, score, patience)
                return await joint.during(episodes()), await joint.during(episodes())

            joint = None
            return asyncio.run(everything()), calls

        ((first, one), (second, two)), _ = together(work)
        assert one == two and sum(map(len, one)) == 12
        assert first == ([[1.0, 2.0, 3.0], [1.0]],) * 2 and second == ([[11.0, 12.0], []],) * 2

    def test_a_failure_while_scoring_is_that_hosts_own(self):
        async def broken():
            raise ValueError("an episode's bug")

        hosts = Hosts(0, 2)  # would wait for ever if it met the other first
        with pytest.raises(ValueError, match="bug"):
            asyncio.run(JointScorer(hosts, None).during(broken()))

    def test_an_evaluation_is_the_same_on_any_number_of_hosts(self):
        config = small_config(eval={"trials": 2})
        tasks, chat = Lookup.tasks(None, "test")[:5], tiny_chat()

        def work(hosts):

            def answer(request):  # differs from seed to seed, so that the wrong seed shows
                return call("answer", code="X4711" if request.seed % 3 else "?")

            player = Player(lookup_source(), chat, FakeEngine(chat, answer), config)
            return asyncio.run(evaluate(player, tasks, config, hosts=hosts))

        ((result, groups), (nothing, theirs)), _ = together(work)
        alone, expected = work(Hosts())
        assert result == alone and groups == expected and 0 < alone["kinds"]["all"]["pass@1"]["mean"] < 1
        assert nothing is None and [g.task_id for g in theirs] == [t.id for t in tasks[1::2]]

    def test_a_step_has_the_same_groups_on_any_number_of_hosts(self):
        config = small_config(rollout={"groups_per_step": 5})
        tasks, chat = [lookup_task(f"train/{i}") for i in range(8)], tiny_chat()

        def answer(request):
            if request.role == "policy":
                return call("answer", code="X4711" if request.seed % 4 == 0 else "?")
            return '{"verdict": "invalid", "reason": "r"}' if request.role == "validator" else "unreadable"

        def work(hosts):
            engine = FakeEngine(chat, answer)
            player = Player(lookup_source(), chat, engine, config)
            roles = Roles(chat, engine, config.sampling, config.rti)
            scorer = JointScorer(hosts, lambda rows: [np.zeros(len(response)) for _, response in rows])
            timed = lambda name: contextlib.nullcontext()  # noqa: E731
            collect = Collection(config, tasks, player, roles, scorer, None, Unrecorded(), timed, hosts)
            return asyncio.run(collect(3))

        (first, second), _ = together(work)
        alone = work(Hosts())
        assert first.everyone == alone.own == alone.everyone and alone.metrics["rti/attempts"] > 0
        counts = lambda metrics: {k: v for k, v in metrics.items() if not k.endswith("_seconds")}  # noqa: E731
        assert counts(first.metrics) == pytest.approx(counts(alone.metrics), nan_ok=True)
        assert [g.id for g in second.own] == [alone.own[i].id for i in second.numbers] and len(second.own) == 2
        assert (first.total, second.total, second.everyone) == (5, 5, second.own)
        assert second.metrics["rollout/groups"] == 5.0  # what the guards look at


class TestWatchdog:
    def beat(self, process, marks, idle, place="step 3, rollout"):
        return Beat(process, f"node{process}", marks, place, idle)

    def test_the_host_that_has_come_least_far_is_named(self):
        waiting = self.beat(0, 8, 500, "step 3, update"), self.beat(2, 8, 500, "step 3, update")
        line = stuck([waiting[0], self.beat(1, 7, 100), waiting[1]], limit=60)
        assert line == (
            "host 1 (node1) has not left step 3, rollout for 100 s; "
            "host 0 (node0), host 2 (node2) wait in step 3, update"
        )

    def test_a_slow_host_that_lives_is_not_stuck(self):
        # the others have been waiting for long, but for a host whose episodes end
        assert stuck([self.beat(0, 8, 500, "step 3, update"), self.beat(1, 7, 10)], limit=60) is None

    def test_of_equals_those_without_a_sign_of_life(self):
        assert stuck([self.beat(0, 7, 10), self.beat(1, 7, 70)], limit=60).startswith("host 1 (node1) has not left")
        assert stuck([self.beat(0, 7, 70), self.beat(1, 7, 80)], limit=60).startswith(
            "host 0 (node0), host 1 (node1) have not left step 3, rollout for 70 s"
        )

    @pytest.fixture
    def store(self):
        return Store()

    def watch(self, store, process=0, limit=0.04):
        """A watchdog, the event that it has ended the process, and why."""
        ended, why = threading.Event(), []
        return Watchdog(store, process, 2, limit, lambda line: (why.append(line), ended.set())), ended, why

    def test_a_host_that_never_reports_is_stuck_at_its_start(self, store):
        watchdog, ended, why = self.watch(store)
        watchdog.mark("step 1, rollout")
        assert ended.wait(30)
        assert why[0].startswith("host 1 (unknown) has not left the start")
        watchdog.stop()

    def test_a_failure_elsewhere_ends_this_host(self, store):
        other, *_ = self.watch(store, process=1, limit=100)
        other.interval = 0.0
        other.mark("step 2, update")
        other.fail("ValueError: no")
        watchdog, ended, why = self.watch(store)
        assert ended.wait(30)
        assert why[0].startswith("host 1 (") and why[0].endswith(" failed in step 2, update: ValueError: no")
        watchdog.stop()


class TestAlone:
    def test_everything_is_immediate(self):
        with join(HostsConfig()) as hosts:
            assert hosts.first and hosts.alone and list(hosts.share(3)) == [0, 1, 2]
            assert hosts.exchange(5) == hosts.collect(5) == [5]
            assert hosts.from_first(lambda: 7) == 7
            hosts.at("step 1")
            hosts.alive()

    @pytest.mark.parametrize("count", [1, 2, 3, 7])
    @pytest.mark.parametrize("total", [0, 1, 5, 16])
    def test_shares_are_everything_once_in_order_and_even(self, count, total):
        shares = [Hosts(i, count).share(total) for i in range(count)]
        assert Hosts.in_order(shares) == list(range(total))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_servers_are_dealt_to_the_hosts():
    config = Config(engine={"kind": "server", "urls": ["http://a", "http://b", "http://c"]})
    assert [own_servers(config, Hosts(i, 2)).engine.urls for i in range(2)] == [["http://a", "http://c"], ["http://b"]]
    with pytest.raises(ConfigError, match="3 server"):
        own_servers(config, Hosts(3, 4))
    started = config.model_copy(update={"engine": config.engine.model_copy(update={"start": 1})})
    assert own_servers(started, Hosts(3, 4)).engine.urls == []  # each host starts its own


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"coordinator": "node1"}, "HOST:PORT"),
        ({"coordinator": "node1:1234"}, "needs hosts.processes and hosts.process_id"),
        ({"coordinator": "node1:1234", "processes": 2, "process_id": 2}, "count from 0"),
    ],
)
def test_incomplete_addresses_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        HostsConfig(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"loss": {"baseline": "opd", "teacher": {"path": "t"}}},
        {"loss": {"baseline": "luffy", "teacher": {"path": "t"}}},
        {"rollout": {"max_rounds": 2}, "loss": {"variant": "dapo"}},
    ],
)
def test_what_one_host_alone_can_do_is_refused(keys):
    Config.model_validate(keys)
    with pytest.raises(ValueError, match="not with hosts.coordinator yet"):
        Config.model_validate({**keys, "hosts": {"coordinator": "auto"}})


def test_commands_of_one_host_say_so(tmp_path):
    config = Config(hosts={"coordinator": "auto"})
    for command, words in (
        (lambda: evaluate_lib.main(config), "rti eval"),
        (lambda: select.main(config, tmp_path / "hard.txt"), "rti select"),
        (lambda: asyncio.run(study_worker.play(config, {}, None)), "rti reproduce"),
    ):
        with pytest.raises(ConfigError, match=f"hosts.coordinator=auto: {words} runs on one host"):
            command()


@pytest.fixture
def nowhere(monkeypatch):
    """An environment of no cluster."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "TPU_", "MEGASCALE_", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)
    return monkeypatch


SLURM = {"SLURM_JOB_ID": "4100", "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.0.0.7,10.1.0.7:34911", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
GKE = {"TPU_WORKER_HOSTNAMES": "127.0.0.1,10.0.0.2", "TPU_WORKER_ID": "1", "MEGASCALE_NUM_SLICES": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SLURM | {"SLURM_STEP_NODELIST": "node[012-014,020]"}, ("node012:61444", 4, 2)),
        (SLURM | {"SLURM_STEP_NODELIST": "a1,b1", "JAX_COORDINATOR_PORT": "7000"}, ("a1:7000", 4, 2)),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}, ("10.0.0.7:62624", 3, 1)),
        # two slices of two hosts: the second host of the second slice
        (GKE | {"MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1", "MEGASCALE_SLICE_ID": "1"}, ("127.0.0.1:8482", 4, 3)),
    ],
    ids=["slurm", "slurm, port", "open mpi", "gke tpu"],
)
def test_who_is_who_as_the_cluster_says(nowhere, environment, expected):
    """One process for each host, whatever number of devices it has."""
    from jax._src.clusters import cloud_tpu_cluster

    nowhere.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    for name, value in ({"TPU_SKIP_MDS_QUERY": "1"} | environment).items():
        nowhere.setenv(name, value)
    asked = {}
    nowhere.setattr(jax.distributed, "initialize", lambda *given, **options: asked.update(options, given=given))
    nowhere.setattr(hosts_lib.atexit, "register", lambda leave: None)
    hosts = join(HostsConfig(coordinator="auto"))
    assert (asked["given"], hosts.index, hosts.count) == (expected, expected[2], expected[1])
    assert asked["cluster_detection_method"] == "deactivate"
    assert "local_device_ids" not in asked


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "neither SLURM"),
        (MPI, "does not say who is who (KeyError: 'OMPI_COMM_WORLD_SIZE')"),
        (
            SLURM | {"SLURM_NTASKS": "", "SLURM_STEP_NODELIST": "a1"},
            "does not say who is who (ValueError: invalid literal",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}, "Open MPI (before 5)"),
    ],
)
def test_nothing_or_half_to_detect_is_one_line(nowhere, environment, words):
    for name, value in environment.items():
        nowhere.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        join(HostsConfig(coordinator="auto"))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith("give hosts.coordinator=HOST:PORT hosts.processes=N hosts.process_id=I")


class TestRecipes:
    """docs/clusters.md: its commands are those of this version, its JobSet is one."""

    TEXT = (HERE.parent / "docs" / "clusters.md").read_text()

    def test_commands_parse(self):
        text = self.TEXT.replace("\\\n", " ").replace("\n                    ", " ")
        found = re.findall(r"rti (\w+) (configs/\S+\.yaml)((?: +[\w.]+=[^\s'`]+)*)", text)
        assert len(found) >= 6 and {command for command, *_ in found} == {"train"}
        names = {"JOB_COMPLETION_INDEX": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
        configs = []
        for _, path, rest in found:
            overrides = [re.sub(r"\$(\w+)", lambda match: names[match[1]], word) for word in rest.split()]
            configs.append(load_config(HERE.parent / path, overrides))
        addresses = {c.hosts.coordinator for c in configs}
        assert addresses == {"auto", "node0:1234", "rti-hosts-0-0.rti:1234"}
        assert all(c.hosts.processes > c.hosts.process_id for c in configs if c.hosts.coordinator != "auto")

    def test_jobset(self):
        """Pod NAME-GROUP-JOB-POD.NAME is process 0; as many pods as processes, each with its own number."""
        part = self.TEXT[self.TEXT.index("    apiVersion:") :]
        job = yaml.safe_load(textwrap.dedent(part[: part.index("\n## ")]))
        (group,) = job["spec"]["replicatedJobs"]
        spec = group["template"]["spec"]
        assert job["kind"] == "JobSet" and spec["completionMode"] == "Indexed" and group["replicas"] == 1
        name, pods = job["metadata"]["name"], spec["parallelism"]
        (container,) = spec["template"]["spec"]["containers"]
        (command,) = container["args"]
        assert spec["completions"] == pods and f"hosts.processes={pods} " in command
        assert f"hosts.coordinator={name}-{group['name']}-0-0.{name}:" in command
        assert f"mesh.fsdp={pods * container['resources']['limits']['nvidia.com/gpu']}" in command
        volumes = {v["name"] for v in spec["template"]["spec"]["volumes"]}
        assert {m["name"] for m in container["volumeMounts"]} == volumes


TOGETHER = {  # calls that end when every process has made them
    *("exchange", "collect", "from_first", "during", "sync", "export", "update", "score"),
    *("_barrier", "sync_global_devices", "process_allgather", "broadcast_one_to_all"),
    *("save", "restore", "restore_params", "load_policy"),
}


def called(*nodes):
    """(line, name) of every call below."""
    for call_ in (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Call)):
        yield call_.lineno, getattr(call_.func, "attr", getattr(call_.func, "id", ""))


def by_one_process(tree):
    """(line, name) of every call that process 0 alone makes, or the others alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_first":
            yield from called(*node.args)
        if isinstance(node, ast.IfExp) and FIRST.search(ast.unparse(node.test)):
            yield from called(node.body, node.orelse)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, ())
            for i, statement in enumerate(block if isinstance(block, list) else ()):
                if isinstance(statement, ast.If) and FIRST.search(ast.unparse(statement.test)):
                    leaves = isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue)
                    yield from called(*statement.body, *statement.orelse, *(block[i + 1 :] if leaves else ()))


FIRST = re.compile(r"\.first\b|_first_process\(\)|process_index\(\)")


class TestNoCollectiveOfOne:
    """What all processes must do together stands under no "if process 0", and in nothing that it alone computes."""

    @pytest.mark.parametrize(
        "source",
        [
            "if hosts.first:\n    hosts.exchange(1)",
            "if not self.hosts.first:\n    return\nself.save(checkpoints)",
            "x = hosts.collect(1) if hosts.first else None",
            "hosts.from_first(lambda: summary.export(folder))",
            "if jax.process_index() == 0:\n    pass\nelse:\n    multihost_utils.sync_global_devices('x')",
        ],
    )
    def test_the_check_sees_them(self, source):
        assert TOGETHER & {name for _, name in by_one_process(ast.parse(source))}

    def test_there_is_none(self):
        found, seen = [], 0
        for path in sorted((*(HERE.parent / "rti_jax").glob("*.py"), *(HERE.parent / "models").glob("*.py"))):
            if not re.search(rf"{FIRST.pattern}|from_first", text := path.read_text()):
                continue
            for line, name in by_one_process(ast.parse(text)):
                seen += 1
                found += [f"{path.name}:{line} {name}"] if name in TOGETHER else []
        assert not found and seen > 30


@pytest.mark.slow
def test_processes_that_do_not_come_are_one_line():
    code = (
        "import sys; from rti_jax.config import HostsConfig; from rti_jax.hosts import join;"
        "join(HostsConfig(coordinator='127.0.0.1:' + sys.argv[1], processes=2, process_id=0, start_timeout=1))"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, "-c", code, str(free_port())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert "were not all there after 1 s (hosts.start_timeout)" in lines[0]
