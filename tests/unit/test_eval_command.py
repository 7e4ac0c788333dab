"""`p3o eval` as a user types it: figures, files, words that are wrong, servers."""

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_p3o import cli
from megatron_p3o.config import to_yaml
from megatron_p3o.evaluation.items import read_results
from megatron_p3o.evaluation.options import EvalOptions
from megatron_p3o.weights import ReshardOptions, TargetLayout, reshard
from tests.unit.test_probe_measure import run_config
from tools.make_tiny_model import make_tiny_model

Command = Callable[..., tuple[int, str, str]]
SIZES = ("--no-chat", "--n", 6, "--max-new-tokens", 3)


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Exit code, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["p3o", "eval", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        written = capsys.readouterr()
        return int(ended.value.code or 0), written.out, written.err

    return run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(3) for b in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_everything_is_written(
    evaluate: Command, tiny_model_dir: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"
    words = (tiny_model_dir, "--data", data, *SIZES, "--limit", 4, "--k", "1,6", "--out", out)
    code, stdout, stderr = evaluate(*words)
    assert code == 0, stderr
    items, summary = read_results(out)
    assert [(item.prompt_id, item.prompt) for item in items] == [
        ("0", "0+0="),
        ("1", "0+1="),
        ("2", "0+2="),
        ("3", "1+0="),
    ]
    for item in items:
        assert item.num_samples == len(item.responses) == len(item.lengths) == 6
        for text, reward, length in zip(item.responses, item.rewards, item.lengths, strict=True):
            assert length <= 3 and reward in (0, 1)
            assert reward == 0 or text.rstrip("+-*=").endswith(item.answer)
    correct = [sum(r or 0 for r in item.rewards) for item in items]
    assert summary["pass_at_k"].keys() == {"1", "6"}
    assert summary["pass_at_k"]["1"]["value"] == pytest.approx(sum(correct) / 24)
    assert summary["pass_at_k"]["6"]["value"] == pytest.approx(sum(c > 0 for c in correct) / 4)
    assert summary["reward_mean"] == summary["pass_at_k"]["1"]
    assert summary["tokens"] == sum(sum(item.lengths) for item in items)
    assert summary["settings"]["threshold"] == 0.5
    assert f"{summary['pass_at_k']['6']['value']:.4f}" in stdout
    code, _, stderr = evaluate(*words)
    assert (code, "already exists" in stderr) == (2, True)

    # The same seed gives the same samples whatever they are batched with, parquet as JSONL.
    table = pyarrow.table({"q": [f"0+{b}=" for b in range(3)], "a": [str(b) for b in range(3)]})
    pyarrow.parquet.write_table(table, tmp_path / "sums.parquet")
    fields = ("--prompt-field", "q", "--answer-field", "a", "--batch-size", 4)
    again = ("--data", tmp_path / "sums.parquet", *SIZES, *fields, "--out", tmp_path / "again")
    code, _, stderr = evaluate(tiny_model_dir, *again)
    assert code == 0, stderr
    assert read_results(tmp_path / "again")[0] == items[:3]


def test_a_run_dir_is_evaluated_by_its_checkpoint(
    evaluate: Command, tiny_model_dir: Path, data: Path, tmp_path: Path
) -> None:
    trained, run = tmp_path / "trained", tmp_path / "run"
    make_tiny_model(trained, seed=1)
    section = {"data": {"source": "jsonl", "path": str(data), "chat": False}, "limit": 2}
    config = run_config(
        tiny_model_dir, run={"dir": str(run), "seed": 3}, eval={**section, "max_new_tokens": 2}
    )
    checkpoint = run / "checkpoints" / "step_2"
    layout = TargetLayout(tensor=2, pipeline=2)
    reshard(trained, checkpoint, ReshardOptions(to="torch_dist", layout=layout))
    shutil.rmtree(checkpoint / "hf")  # a run's checkpoint has none
    (checkpoint / "trainer.json").write_text("{}")
    (checkpoint.parent / "latest").write_text("step_2")
    (run / "config.yaml").write_text(to_yaml(config))
    code, _, stderr = evaluate(run, "--n", 4)
    assert code == 0, stderr
    items, summary = read_results(run / "eval" / "step_2")
    settings = summary["settings"]
    assert (settings["seed"], settings["temperature"], settings["max_new_tokens"]) == (3, 0.8, 2)
    assert (len(items), settings["source"]) == (2, str(checkpoint))
    words = ("--run", run / "config.yaml", "--n", 4, "--out", tmp_path / "hf")
    assert evaluate(trained, *words)[0] == 0
    assert read_results(tmp_path / "hf")[0] == items
    code, _, stderr = evaluate(run, "--n", 2, "--data", data)  # has a name of its own
    assert code == 0, stderr
    assert len(read_results(run / "eval" / "step_2-sums")[0]) == 9


def test_failed_rewards(
    evaluate: Command,
    tiny_model_dir: Path,
    tmp_path: Path,
    data: Path,
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1=", "answer": "none"}\n')
    words = ("--data", tmp_path / "bad.jsonl", *SIZES, "--out", tmp_path / "out")
    code, _, stderr = evaluate(tiny_model_dir, *words)
    assert (code, "6 of 6 rewards" in stderr) == (1, True), stderr
    assert not (tmp_path / "out").exists()


def test_k_follows_from_n() -> None:
    ks = {n: EvalOptions(target=Path("m"), num_samples=n).pass_at() for n in (1, 3, 4, 16, 63, 64)}
    assert ks == {1: (1,), 3: (1,), 4: (1, 4), 16: (1, 4, 16), 63: (1, 4, 16), 64: (1, 4, 16, 64)}
    assert EvalOptions(target=Path("m"), ks=(8, 2, 8)).pass_at() == (2, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--n", "0"], "--n=0 must be >= 1"),
        (["--k", "1,32"], "--k=32 must be at most --n=16"),
        (["--k", "1;4"], "--k=1;4 must be whole numbers"),
        (["--temperature", "0"], "--temperature=0.0 must be above 0"),
        (["--threshold", "nan"], "--threshold=nan must be finite"),
        (["--engine", "vllm"], "--engine=vllm must be embedded or sglang"),
        (["--engine", "sglang"], "set both or neither"),
        (["--servers", "http://127.0.0.1:1"], "set both or neither"),
        (["--reward", "guess"], "data.reward.name='guess' must be one of"),
        (["--max-new-tokens", "126"], "has 4 tokens and --max-new-tokens=126 follow"),
        (["--chat"], "data.chat=true needs a tokenizer with a chat template"),
        (["--data", "sums.csv"], "must end in .jsonl or .parquet"),
        (["--data", "nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
        (
            ["--engine", "sglang", "--servers", "http://127.0.0.1:1", "--max-new-tokens", "3"],
            "--servers=http://127.0.0.1:1 cannot be asked for its model",
        ),
    ],
)
def test_bad_words(
    evaluate: Command,
    tiny_model_dir: Path,
    data: Path,
    tmp_path: Path,
    words: list[str],
    message: str,
) -> None:
    out = tmp_path / "out"
    code, _, stderr = evaluate(tiny_model_dir, "--data", data, "--no-chat", "--out", out, *words)
    assert (code, message in stderr) == (2, True), stderr
    assert not out.exists()


def test_what_is_left_out(evaluate: Command, tiny_model_dir: Path, data: Path) -> None:
    for words, message in (
        ((tiny_model_dir,), "says nothing about data; add --data"),
        ((tiny_model_dir, "--data", data, "--no-chat"), "is no run dir"),
        (("nowhere", "--data", data), "'nowhere' does not exist; give a model directory"),
    ):
        code, _, stderr = evaluate(*words)
        assert (code, message in stderr) == (2, True), stderr


class Fake(BaseHTTPRequestHandler):
    """Answers every prompt with `7` and the end, after refusing the first request."""

    model_path: str
    version: str
    bodies: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._send(200, {"model_path": self.model_path, "weight_version": self.version})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if len(self.bodies) == 1:
            self._send(503, {"error": "busy"})
            return
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 9, None], [-0.1, 1, None]],
            "weight_versions": [{"version": "default", "start": 0, "end": 2}],
        }
        self._send(200, {"output_ids": [9, 1], "meta_info": meta})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words: Any) -> None:
        pass


@contextmanager
def server(model_path: Path, version: str = "default") -> Iterator[tuple[str, type[Fake]]]:
    class Handler(Fake):
        pass

    Handler.model_path, Handler.version, Handler.bodies = str(model_path), version, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", Handler
        finally:
            listening.shutdown()
            thread.join()


def test_servers_that_serve_the_model(
    evaluate: Command, tiny_model_dir: Path, data: Path, tmp_path: Path
) -> None:
    words = (tiny_model_dir, "--data", data, *SIZES, "--temperature", 0.7, "--engine", "sglang")
    with server(tiny_model_dir) as (url, handler):
        code, _, stderr = evaluate(*words, "--servers", url + "/", "--out", tmp_path / "out")
    assert code == 0, stderr
    items, summary = read_results(tmp_path / "out")
    assert {text for item in items for text in item.responses} == {"7"}
    assert len(handler.bodies) == 9 * 6 + 1
    assert handler.bodies[-1]["sampling_params"]["temperature"] == 0.7
    (served,) = summary["settings"]["servers"]
    assert served == {"url": url, "model_path": str(tiny_model_dir), "weight_version": "default"}

    other = tmp_path / "other"
    make_tiny_model(other, seed=1)
    for path, version, message in (
        (other, "default", "whose files differ from those of MODEL_OR_RUN"),
        (tiny_model_dir, "unpublished", "waits for the weights of a run"),
    ):
        with server(path, version) as (url, _):
            code, _, stderr = evaluate(*words, "--servers", url, "--out", tmp_path / "no")
        assert (code, message in stderr) == (2, True), stderr
