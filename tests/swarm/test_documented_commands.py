"""Every command of README and docs runs, or says here why not: a page that nobody tries is wrong within a month.

The swarm that they speak to is README's own run, started by README's own commands and fed slowly. Ports are free ones,
addresses and links those of that swarm, and runs are a few small steps long, by as few peers as a command leaves open;
else commands run as they are printed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from running import PATIENCE_S, Forked, train_locally
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import BpeTrainer

from swarmnet.cli.frame import run
from swarmnet.manifest.file import load, override, run_id, to_toml
from swarmnet.testing.process_swarm import child_launcher

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

ELSEWHERE = {
    r"^\.venv/bin/ruff": "CI runs it",
    r"^git clone": "the repository has to be somewhere",
    r"^python3 -m venv .*pytest": "CI runs it",
    r"^python3 -m venv .*&& \. ": "installs; test_two_wheels.py does it from a wheel",
    r"^pip install": "the package is on no index that tests may ask",
    r"^swarmnet (peer|join) .*--gpus (?!8$)": "needs GPUs; README's eight are ranks on the CPU here",
    r"^swarmnet peer .*--ranks": "test_mixed_mesh.py has peers of several ranks",
    r"^swarmnet local --ranks": "test_mixed_mesh.py has peers of several ranks",
    r"^swarmnet init .*--from": "wants 2.5 GB of Llama; test_huggingface_swarm.py makes a small one",
    r"^swarmnet export .*stage-1-2": "the same with one directory runs below",
    r"swarmnet local --stages 3 --replicas 2 --steps 60( --kill \S+)*( --verify)?$": "test_equal_to_one_process.py",
    r"^swarmnet local .*--liars": "test_local_liars.py has two kinds of them",
    r"^swarmnet local .*--trace": "test_trace_processes.py reads what it wrote",
    r"^swarmnet join (--port \d+ --dht-port \d+ )?LINK$": "test_join.py does it; those that run here say more",
    r"^swarmnet watch LINK( --csv \S+ --png \S+)?$": "watch.md's writes these two and a third",
    r"^swarmnet eval (LINK --data|run.toml --bootstrap)": "test_eval_swarm.py asks a swarm by either",
    r"^swarmnet export LINK": "test_huggingface_swarm.py compares what it fetched",
    r"^swarmnet control limits": "test_leaving_processes.py asks a peer that runs",
    r"^swarmnet audit verify": "nobody lies in this run; test_evidence.py runs it",
}
"""Pattern of a command -> why it does not run here."""

GOES_ON = {
    r"swarmnet join": "serving",
    r"swarmnet watch (?!.*--once)": "step ",
    r"swarmnet dashboard": "http://127",
    r"swarmnet peer .*--gpus": "mesh_started",
}
"""Pattern of a command that goes on until Ctrl+C -> what it says when it works."""

OF_OWN_RUN = r"swarmnet (bootstrap|peer|trainer) (?!.*--gpus)"

TINY = (
    *("model.hidden_size=64", "model.intermediate_size=128", "model.head_dim=16"),
    *("training.microbatch_size=1", "training.microbatches=4"),
)
SMALL = " ".join(f"--set {each}" for each in (*TINY, "training.sequence_length=32"))
OWN = (*TINY, "training.checkpoint_every=5")
"""What makes steps small; later commands ask the own run for a checkpoint."""

VERDICT = r"swarmnet (doctor|status|plan)"
"""Exit code 1 is what it thinks of this machine, or of the run."""


def commands() -> list[tuple[str, str]]:
    """(page, command), each command once, in the order of the pages."""
    found: dict[str, str] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.partition(" # ")[0].strip()
                if command and not command.startswith("#"):
                    found.setdefault(re.sub(r"swarm:RUN_ID@(/\S*|ADDRESS)", "LINK", command), page.name)
    return [(page, command) for command, page in found.items()]


COMMANDS = commands()


TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


class Site:
    """A directory to type commands in, and a swarm that is up: README's own run."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.link, self.address = directory, "", ""
        self._running: list[Forked] = []
        with self._inside():
            self._launcher = child_launcher()
        for name in ("books", "text"):
            (directory / name).mkdir()
            (directory / name / "one.txt").write_text(TEXT * 4, encoding="utf-8")
        (directory / "corpus.txt").write_text(TEXT * 10, encoding="utf-8")
        (directory / "essay.txt").write_text(TEXT * 4, encoding="utf-8")
        shutil.copy(ROOT / "docs/fleet.toml", directory)
        some = Tokenizer(BPE(unk_token="?"))
        some.pre_tokenizer = Whitespace()
        some.train_from_iterator([TEXT], BpeTrainer(vocab_size=400, special_tokens=["?", "<|endoftext|>"]))
        some.save(str(directory / "tokenizer.json"))

    def typed(self, command: str) -> list[str]:
        """What is typed here in its place, without the first word."""
        text = re.sub(r"\bLINK\b", self.link, command).replace(
            "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...", self.address
        )
        if text.startswith("swarmnet peer"):
            text = text.replace("--gpus ", "--device cpu --ranks ")
        text = re.sub(r"--(dht-)?port \d+", r"--\1port 0", text).replace("~/", f"{self.directory}/home/")
        if text.startswith("swarmnet local"):
            steps = "--steps 6" if "--kill" in text else "--steps 3"
            text = re.sub(r"--steps \d+", steps, re.sub(r"(?<=--kill \d)@\d+", "@2", text))
            missing = {"--out": f"runs/{len(text)}", "--stages": "2", "--replicas": "1"}
            text = " ".join([text, SMALL, *(f"{name} {value}" for name, value in missing.items() if name not in text)])
        if text.startswith("swarmnet eval") and "--microbatches" not in text:
            text += " --microbatches 10"
        # What `local` has left, in place of what peers leave at step 50.
        text = re.sub(r"run\.toml (\./model )?--dir DIR", r"runs/local/run.toml \1", text)
        text = text.replace("runs/local-0-TIME", "runs/local").replace("./model", f"./model-{abs(hash(command))}")
        # Later pages write a run.toml of their own.
        text = text.replace("swarmnet init", "swarmnet init --force").replace(
            "run.toml --bootstrap", "own.toml --bootstrap"
        )
        text = re.sub(r"^swarmnet join --", "swarmnet join --no-restart --", text)  # test_join.py's is started again
        text = re.sub(r"^swarmnet (bootstrap|peer|trainer|join)\b", r"\g<0> --host 127.0.0.1", text)
        return shlex.split(text)[1:]

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Here, in a home of its own. What all users' processes share, as compiled kernels, stays where it is."""
        shared = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        home = {"HOME": str(self.directory / "home"), "XDG_CACHE_HOME": shared}
        with contextlib.chdir(self.directory), mock.patch.dict(os.environ, home):
            yield

    def run(self, words: list[str]) -> int:
        """The exit code. In this process, which has imported what it takes."""
        with self._inside():
            if words[0] != "local":
                return run(words)
            code, said = train_locally(*words[1:])
            print(said)
            return code

    def start(self, words: list[str]) -> Path:
        """Start a process; returns the file of what it prints."""
        log = self.directory / f"{len(self._running)}-{words[0]}.log"
        log.write_text("", encoding="utf-8")
        self._running.append(Forked("-m", "fed_slowly", "0.5", *words, log=log, launcher=self._launcher))
        return log

    def wait_for(self, words: str, log: Path) -> str:
        """The line of `log` that has `words`, once it is there."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            text = log.read_text(encoding="utf-8", errors="replace")
            if found := [line for line in text.splitlines() if words in line]:
                return found[0]
            assert self._running[-1].poll() is None, f"it ended:\n{text}"
            time.sleep(0.05)
        raise AssertionError(f"it never said {words!r}:\n{log.read_text()}")

    def interrupt(self) -> int:
        """Ctrl+C in what was started last; its exit code."""
        last = self._running.pop()
        last.send_signal(signal.SIGINT)
        try:
            return last.wait(PATIENCE_S)
        finally:
            last.kill()

    def close(self) -> None:
        """Nothing outlives the tests."""
        for each in self._running:
            each.kill()
        for each in self._running:
            each.wait()
        self._launcher.close()


OWN_RUN = [command for page, command in COMMANDS if page == "README.md" and re.match(OF_OWN_RUN, command)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    try:
        first, *others = OWN_RUN
        init = next(command for page, command in COMMANDS if page == "README.md" and " init " in command)
        assert site.run(site.typed(init)) == 0 and " bootstrap" in first
        own = override(load(site.directory / "run.toml"), OWN)
        for name in ("run.toml", "own.toml"):
            (site.directory / name).write_text(to_toml(own), encoding="utf-8")
        line = site.wait_for("/p2p/", site.start(site.typed(first)))
        site.address = re.findall(r"/ip4/\S+", line)[0]
        site.link = f"swarm:{run_id(own)}@{site.address}"
        logs = [site.start(site.typed(command)) for command in others]
        site.wait_for("progress", logs[-1])  # of the trainer: steps are made
        yield site
    finally:
        site.close()


def test_every_reason_is_for_a_command_and_the_own_run_is_whole() -> None:
    unused = [pattern for pattern in ELSEWHERE if not any(re.search(pattern, command) for _, command in COMMANDS)]
    assert len(COMMANDS) > 40 and not unused
    named = {name for why in ELSEWHERE.values() for name in re.findall(r"test_\w+\.py", why)}
    assert named and named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert [shlex.split(command)[1] for command in OWN_RUN] == ["bootstrap", "peer", "peer", "peer", "trainer"]


def here() -> list[tuple[str, str]]:
    """What runs here: first the run whose files later ones read."""
    found = [each for each in COMMANDS if not any(re.search(pattern, each[1]) for pattern in ELSEWHERE)]
    return sorted(found, key=lambda each: "--out runs/local" not in each[1])


HERE = here()


@pytest.mark.parametrize("command", [command for _, command in HERE], ids=[page for page, _ in HERE])
def test_it_runs(command: str, site: Site) -> None:
    if command in OWN_RUN:
        return  # the site's
    if "swarmnet local" in command:
        command = command[command.index("swarmnet local") :]  # without what installs it
    words = site.typed(command)
    assert command.startswith("swarmnet "), f"no test knows how to run {command}"
    if said := next((said for pattern, said in GOES_ON.items() if re.match(pattern, command)), ""):
        site.wait_for(said, site.start(words))
        assert site.interrupt() == 0
    else:
        assert site.run(words) in ((0, 1) if re.match(VERDICT, command) else (0,))
