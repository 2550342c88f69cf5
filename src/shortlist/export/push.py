"""Upload of packages to the Hugging Face Hub, as repositories of models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)

from shortlist import __version__
from shortlist.errors import ConfigError, ShortlistError
from shortlist.export.package import PACKAGE_FILES


class HubError(ShortlistError, RuntimeError):
    """The Hugging Face Hub cannot be reached, or refuses an upload."""


def check_push(repository: str) -> None:
    """Check, without network access, that a package could be uploaded.

    Raises:
        ConfigError: The repository is not of the form OWNER/NAME, or there is no access token.
    """
    try:
        validate_repo_id(repository)
        valid = "/" in repository
    except HFValidationError:
        valid = False
    if not valid:
        raise ConfigError(
            f"`push_to_hub` should be OWNER/NAME, such as my-name/my-model, of letters, digits, '-', '_' and '.', not "
            f"{repository!r}."
        )
    if get_token() is None:
        raise ConfigError(
            "`push_to_hub` needs an access token of the Hugging Face Hub with write permission: run hf auth login, or "
            "set the environment variable HF_TOKEN."
        )


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload the files of a package in one commit. The repository is created if it does not exist.

    Args:
        folder: Folder of the package.
        repository: Repository of a model, OWNER/NAME.
        private: Whether the repository must be private.

    Returns:
        The address of the repository.

    Raises:
        HubError: The Hub cannot be reached or refuses the upload, or the repository exists and is not private.
    """
    api = HfApi(library_name="shortlist", library_version=__version__)
    try:
        address = api.create_repo(repository, private=private or None, exist_ok=True)
        public = private and not api.model_info(repository).private
        if not public:
            files = [CommitOperationAdd(name, folder / name) for name in PACKAGE_FILES]
            with _without_bars():
                api.create_commit(repository, files, commit_message=f"Upload a package of shortlist {__version__}")
    except Exception as error:  # raised by the Hub's client, its HTTP library, or the network
        again = f"The package is in {folder}; to upload it later: hf upload {repository} {folder}"
        raise HubError(f"{_reason(error, repository, api.endpoint)}. {again}") from error
    if public:
        raise HubError(
            f"{repository} exists and is public, so nothing was uploaded: make it private in its settings, or use "
            f"another name. The package is in {folder}."
        )
    return str(address)


def _reason(error: BaseException, repository: str, endpoint: str) -> str:
    while not isinstance(error, HfHubHTTPError) and (reason := error.__cause__ or error.__context__) is not None:
        error = reason
    detail = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code not in (401, 403):
            return f"{endpoint} refused the upload to {repository} ({detail})"
        token = "run hf auth login with a token that has write permission"
        return f"The access token may not write to {repository} ({detail}): {token}"
    if isinstance(error, OSError):
        return f"{endpoint} cannot be reached ({detail})"
    return f"The upload to {repository} failed ({detail})"


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the Hub's own progress bars, unless the user has configured them explicitly."""
    change = constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not are_progress_bars_disabled()
    if change:
        disable_progress_bars()
    try:
        yield
    finally:
        if change:
            enable_progress_bars()
