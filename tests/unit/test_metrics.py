import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_p3o.trainer.metrics import (
    JsonlSink,
    Metric,
    Over,
    TensorBoardSink,
    combine,
    read_metrics,
)


def test_each_metric_combines_as_it_says() -> None:
    first = {
        "mean": Metric(1.0),
        "max": Metric(5.0, Over.MAX),
        "min": Metric(5.0, Over.MIN),
        "sum": Metric(2.0, Over.SUM),
        "last": Metric(1.0, Over.LAST),
    }
    second = {
        "mean": Metric(2.0),
        "max": Metric(3.0, Over.MAX),
        "min": Metric(3.0, Over.MIN),
        "sum": Metric(3.0, Over.SUM),
        "last": Metric(9.0, Over.LAST),
    }
    assert combine([first, second]) == {
        "mean": 1.5,
        "max": 5.0,
        "min": 3.0,
        "sum": 5.0,
        "last": 9.0,
    }


def test_a_metric_combines_over_the_steps_that_have_it() -> None:
    updates = [{"a": Metric(1.0), "b": Metric(4.0)}, {"a": Metric(3.0), "c": Metric(5.0)}]
    assert combine(updates) == {"a": 2.0, "b": 4.0, "c": 5.0}


def test_the_alarm_is_text_in_every_sink(tmp_path: Path) -> None:
    sinks = [
        JsonlSink(tmp_path / "metrics.jsonl", first_step=0),
        TensorBoardSink(tmp_path / "tensorboard", first_step=0),
    ]
    for sink in sinks:
        sink.write(0, {"ess/step": 0.1, "alarm": "ESS is low"})
        sink.close()
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record == {"step": 0, "ess/step": 0.1, "alarm": "ESS is low"}
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("alarm/text_summary")
    assert event.tensor_proto.string_val == [b"ESS is low"]


def test_floats_survive_the_file(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", first_step=0)
    sink.write(0, {"loss/total": 0.1 + 0.2})
    sink.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "loss/total": 0.1 + 0.2}]


def test_resuming_drops_steps_after_the_checkpoint_and_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "x": 1.0}) for step in range(4)]
    path.write_text("\n".join(lines) + '\n{"step": 4, "x"')
    sink = JsonlSink(path, first_step=2)
    sink.write(2, {"x": 7.0})
    sink.close()
    assert [(r["step"], r["x"]) for r in read_metrics(path)] == [(0, 1.0), (1, 1.0), (2, 7.0)]


def test_tensorboard_gets_the_same_values_and_forgets_what_a_resume_repeats(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, first_step=0)
    for step in range(3):
        sink.write(step, {"reward/mean": 0.5 + step})
    sink.close()
    resumed = TensorBoardSink(tmp_path, first_step=1)
    resumed.write(1, {"reward/mean": 9.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(0, 0.5), (1, 9.0)]
