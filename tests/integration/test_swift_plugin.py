"""The plugin that gives a rollout server of ms-swift the repeat guard, with the installed vLLM and without an
engine (test_engine_guard.py has one). ms-swift is a fake, recorded from its source; it is not run itself."""

import sys
from pathlib import Path

import pytest

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RepeatTerminate
from coordexp.errors import EngineError
from coordexp.rollout.guard import ENGINE_GUARD, EngineGuard, key_pattern
from coordexp.servers import SWIFT_REPEAT_GUARD
from coordexp.servers.swift import FILE, TEXT
from tests.fake_swift import FakeSwiftRollout
from tests.integration.stage2_runs import MODEL

ENABLED = RepeatTerminate(enabled=True, max_object_keys=40)


@pytest.mark.scenario("R33.C3", "R33.S3", on="recorded")
@pytest.mark.parametrize("use_async_engine", [True, False])
def test_engine_arguments_that_are_built_after_the_plugin_was_loaded_have_the_guard(use_async_engine):
    """ms-swift is a recorded fake; vLLM's argument classes are the installed ones."""
    with FakeSwiftRollout(ENABLED) as swift:
        assert swift.engine_arguments(MODEL, use_async_engine).logits_processors is None
        swift.import_external_plugins([SWIFT_REPEAT_GUARD, SWIFT_REPEAT_GUARD])
        assert swift.engine_arguments(MODEL, use_async_engine).logits_processors == [ENGINE_GUARD]
        other = swift.engine_arguments(MODEL, use_async_engine, logits_processors=["other:Processor"])
        assert other.logits_processors == ["other:Processor", ENGINE_GUARD]
        config = swift.engine_arguments(MODEL, use_async_engine).create_model_config()
        assert config.logits_processors == [ENGINE_GUARD]


@pytest.mark.scenario("R33.C2", on="recorded")
def test_the_config_that_vllm_passes_to_the_processes_of_an_engine_has_the_settings_of_the_guard():
    table = VocabularyTable.from_folder(MODEL)
    with FakeSwiftRollout(ENABLED) as swift:
        swift.import_external_plugins([SWIFT_REPEAT_GUARD])
        arguments = swift.engine_arguments(MODEL, False, additional_config={"another": 1})
    config = arguments.create_engine_config().additional_config
    assert config["another"] == 1
    expected = EngineGuard(**ENABLED.model_dump(), key_pattern=key_pattern(table), end_of_turn=table.end_of_turn)
    assert EngineGuard.of(config) == expected


@pytest.mark.scenario("R33.C2", on="recorded")
def test_the_settings_may_come_from_a_file_and_a_disabled_guard_changes_nothing(tmp_path, monkeypatch):
    file = tmp_path / "guard.json"
    monkeypatch.setenv(FILE, str(file))
    for guard, processors in ((ENABLED, [ENGINE_GUARD]), (RepeatTerminate(), None)):
        file.write_text(guard.model_dump_json())
        with FakeSwiftRollout(None) as swift:
            swift.import_external_plugins([SWIFT_REPEAT_GUARD])
            assert swift.engine_arguments(MODEL, True).logits_processors == processors


FAULTS = {
    "not set": ({}, f"{FILE}: the repeat guard cannot be loaded (it is not set)"),
    "half": ({TEXT: '{"enabled": true}'}, f"{TEXT}: the repeat guard cannot be loaded (max_consecutive_token"),
    "no JSON": ({TEXT: "enabled"}, f"{TEXT}: the repeat guard cannot be loaded (Expecting value"),
    "no file": ({FILE: "/nothing.json"}, "/nothing.json"),
}


@pytest.mark.scenario("R33.S2", on="recorded")
@pytest.mark.parametrize(("variables", "reason"), FAULTS.values(), ids=FAULTS)
def test_settings_that_cannot_be_read_stop_the_server_when_it_loads_the_plugin(monkeypatch, variables, reason):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with FakeSwiftRollout(None) as swift, pytest.raises(EngineError) as error:
        swift.import_external_plugins([SWIFT_REPEAT_GUARD])
    assert reason in str(error.value)
    assert f"set {TEXT} to the whole rollout_matching.repeat_terminate" in str(error.value)


@pytest.mark.scenario("R33.S2", on="recorded")
def test_a_guard_that_vllm_could_not_load_stops_the_server_when_it_loads_the_plugin(monkeypatch):
    monkeypatch.setitem(sys.modules, "coordexp.rollout.repeat_guard", None)
    with FakeSwiftRollout(ENABLED) as swift:
        with pytest.raises(EngineError, match=rf"enabled, and {ENGINE_GUARD} cannot be loaded"):
            swift.import_external_plugins([SWIFT_REPEAT_GUARD])
        assert swift.engine_arguments(MODEL, True).logits_processors is None


@pytest.mark.scenario("R33.S2", on="recorded")
def test_a_vllm_that_loads_no_logits_processors_stops_the_server_when_it_loads_the_plugin(monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.delitem(EngineArgs.__dataclass_fields__, "logits_processors")
    with (
        FakeSwiftRollout(ENABLED) as swift,
        pytest.raises(EngineError, match="EngineArgs has no logits_processors"),
    ):
        swift.import_external_plugins([SWIFT_REPEAT_GUARD])


def test_the_folder_of_the_plugin_shadows_no_module_when_it_is_on_the_import_path():
    """ms-swift puts the folder there, before everything else."""
    names = {file.stem for file in Path(SWIFT_REPEAT_GUARD).parent.iterdir() if file.suffix == ".py"}
    assert names == {"swift_repeat_guard"}
