"""A bar on standard error for what takes long, while that is a terminal."""
import sys
import time


class Progress:
    """Of `total` units; a unit is a byte unless it is named. Where the total is 0, it is not known: then there is no bar."""

    def __init__(self, total, unit="B", label=""):
        self.total, self.unit, self.label = total, unit, label and label + " "
        self.done, self.start, self.shown = 0, time.monotonic(), 0.0
        self.resumed = 0  # of what is done, so much was there before
        self.terminal = sys.stderr.isatty()

    def add(self, amount):
        self.done += amount
        now = time.monotonic()
        if self.terminal and (now - self.shown > 0.2 or self.done == self.total):
            self.shown = now
            rate = (self.done - self.resumed) / max(now - self.start, 1e-9)
            speed = f"{rate / 1e6:.1f} M{self.unit}/s"
            if self.total:
                part = min(self.done / self.total, 1)
                left = max(self.total - self.done, 0) / max(rate, 1e-9)
                bar = "#" * int(30 * part)
                sys.stderr.write(f"\r{self.label}[{bar:30}] {100 * part:3.0f}%  {speed}  {left:.0f} s left  ")
            else:
                sys.stderr.write(f"\r{self.label}{self.done / 1e6:.0f} M{self.unit}  {speed}  ")
            sys.stderr.flush()

    def end(self):
        if self.terminal and self.done:
            sys.stderr.write("\r\033[K")
