"""What autodist_py logs, on standard error, where the script has not set up logging itself."""

import logging

_NAME = "autodist_py"


def show_logs(level: str | None) -> None:
    """What is logged is shown: from `level` on (default: as Python's root logger), by one handler, made once.

    Where the root logger, or ours, has a handler of the script's that one shows it.
    """
    logger = logging.getLogger(_NAME)
    if level is not None:
        logger.setLevel(level)
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    handler.addFilter(lambda record: not logging.getLogger().handlers)  # They may be made later.
    logger.addHandler(handler)
