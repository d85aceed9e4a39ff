"""What a bucket of S3 says of one object among many that are to be deleted."""

from __future__ import annotations

import asyncio

import pytest

from tests.tiers.test_objects import answer, opened, says, server
from tiers.errors import ObjectError, ObjectRefused, ObjectUnavailable


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("AccessDenied", ObjectRefused),
        ("MethodNotAllowed", ObjectRefused),
        ("InvalidRequest", ObjectRefused),
        ("InternalError", ObjectUnavailable),
        ("SlowDown", ObjectUnavailable),
    ],
)
def test_one_that_may_not_be_deleted_is_refused(code: str, kind: type[ObjectError]) -> None:
    """The answer is 200, the others are deleted, and the one has a code of its own: a lock or a policy is no failure of the place."""
    error = f"<Error><Key>pre/fix/b</Key><Code>{code}</Code><Message>no (code: Lie)</Message></Error>"
    body = f"<DeleteResult><Deleted><Key>pre/fix/a</Key></Deleted>{error}</DeleteResult>"

    async def main() -> None:
        serve, asked = says(answer("200 OK", body))
        async with server(serve) as endpoint:
            with pytest.raises(kind):
                await opened(endpoint).delete(["a", "b"])
        assert len(asked) == (1 if kind is ObjectRefused else 3)

    asyncio.run(main())
