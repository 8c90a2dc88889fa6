"""What every Python test shares: named tests, checks that say what failed, one closing count (see tests/run.py).

    from check import test, check, skip, end
    with test("a name"):
        check(1 + 1 == 2, "got", 1 + 1)
    end()
"""
import contextlib
import sys
import traceback

_counts = {"passed": 0, "failed": 0, "skipped": 0}
_faults = []


class _Skip(Exception):
    pass


@contextlib.contextmanager
def test(name):
    """One named test: passes when no check failed and nothing was raised."""
    del _faults[:]
    try:
        yield
    except _Skip as reason:
        _counts["skipped"] += 1
        print(f"skip {name}: {reason}", flush=True)
        return
    except Exception:
        _faults.append(traceback.format_exc().rstrip())
    for fault in _faults[:10]:
        print(f"  {name}: {fault}")
    _counts["failed" if _faults else "passed"] += 1
    print(("FAIL " if _faults else "ok   ") + name, flush=True)


def check(good, *what):
    """Records a fault, with the words of `what`, unless `good`."""
    if not good:
        _faults.append(" ".join(str(word) for word in what) or "check failed")
    return bool(good)


def skip(reason):
    """Ends the open test as one that cannot run here."""
    raise _Skip(reason)


def end():
    """Prints the closing count and exits."""
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**_counts))
    sys.exit(1 if _counts["failed"] else 0)
