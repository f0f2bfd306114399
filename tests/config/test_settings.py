"""What the environment may say, and how it is refused."""

from pathlib import Path

import pytest

from autodist_py.config.settings import Settings, SettingsError


def test_an_empty_environment_is_a_chief_with_the_defaults():
    settings = Settings.from_environment({})

    assert settings == Settings()
    assert (settings.rank, settings.coordinator, settings.heartbeat_timeout) == (None, None, 5.0)


def test_every_variable_is_read():
    settings = Settings.from_environment(
        {
            "AUTODIST_RANK": "2",
            "AUTODIST_COORDINATOR": "127.0.0.1:4000",
            "AUTODIST_RESOURCE_SPEC": "spec.yaml",
            "AUTODIST_WORKER_OUTPUT": "5",
            "AUTODIST_DUMP_DIR": "dump",
            "AUTODIST_LOG_LEVEL": "debug",
            "AUTODIST_JOIN_TIMEOUT": "9.5",
            "AUTODIST_HEARTBEAT_TIMEOUT": "7",
            "AUTODIST_LOST_WORKERS": "continue",
            "AUTODIST_EXIT_GRACE": "1",
            "AUTODIST_COORDINATOR_PORT": "4000",
            "AUTODIST_SERVER_PORT": "5000",
            "AUTODIST_CHECKED_STEPS": "3",
        }
    )

    assert settings == Settings(
        2, "127.0.0.1:4000", Path("spec.yaml"), 5, Path("dump"), "DEBUG", 9.5, 7.0, "continue", 1.0, 4000, 5000, 3
    )


def test_space_around_a_value_and_a_value_of_space_are_as_none():
    given = {"AUTODIST_SEED": " 7 ", "AUTODIST_LAUNCH": " none ", "AUTODIST_JOIN_TIMEOUT": " ", "AUTODIST_STRATEGY": ""}
    assert Settings.from_environment(given) == Settings(seed=7, launch="none")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"AUTODIST_RANK": "one", "AUTODIST_COORDINATOR": "h:1"}, "AUTODIST_RANK is a whole number .* Received: 'one'"),
        ({"AUTODIST_RANK": "1"}, "AUTODIST_RANK and AUTODIST_COORDINATOR are set together"),
        ({"AUTODIST_RANK": "1", "AUTODIST_COORDINATOR": "here:\u00b2"}, "AUTODIST_COORDINATOR is host:port"),
        ({"AUTODIST_RANK": "1", "AUTODIST_COORDINATOR": "here:65536"}, "AUTODIST_COORDINATOR is host:port"),
        ({"AUTODIST_RANK": "0", "AUTODIST_COORDINATOR": "h:1"}, "rank 0 is the chief"),
        ({"AUTODIST_RANK": "1", "AUTODIST_COORDINATOR": "here"}, "AUTODIST_COORDINATOR is host:port"),
        ({"AUTODIST_HEARTBEAT_TIMEOUT": "1"}, "AUTODIST_HEARTBEAT_TIMEOUT is a number of seconds, 2 or more"),
        ({"AUTODIST_JOIN_TIMEOUT": "1e300"}, "AUTODIST_JOIN_TIMEOUT is a number of seconds, .* at most 1000000000"),
        ({"AUTODIST_SEED": "9" * 5000}, "AUTODIST_SEED is a whole number from 0 to 2147483647. Received: '999"),
        ({"AUTODIST_EXIT_GRACE": "nan"}, "AUTODIST_EXIT_GRACE is a number of seconds"),
        ({"AUTODIST_SERVER_PORT": "65536"}, "AUTODIST_SERVER_PORT is a whole number from 0 to 65535"),
        ({"AUTODIST_SERVER_PORT": "1.5"}, "AUTODIST_SERVER_PORT is a whole number from 0 to 65535. Received: '1.5'"),
        ({"AUTODIST_KEPT_PROGRAMS": "0"}, "AUTODIST_KEPT_PROGRAMS is a whole number from 1 to 2147483647"),
        ({"AUTODIST_LAUNCH": "None"}, "AUTODIST_LAUNCH is one of auto, none. Received: 'None'"),
        ({"AUTODIST_COORDINATOR": "h:1\n2", "AUTODIST_RANK": "1"}, "AUTODIST_COORDINATOR is host:port. Received: 'h:1"),
        ({"AUTODIST_LOG_LEVEL": "loud"}, "AUTODIST_LOG_LEVEL is one of DEBUG"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_variable_and_the_rule(environment, message):
    with pytest.raises(SettingsError, match=message):
        Settings.from_environment(environment)
