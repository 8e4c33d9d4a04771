"""The error ledger: at which level the next look at a sealed set may promote.

A window holds J looks. With R promotions so far in the window, look h has the level
a_h = min(alpha, s_h (R + 1)), where the spends s_h are fixed beforehand and sum to at most alpha. Since
FDP <= sum 1{null, p_h <= a_h} / (R + 1), its expectation is at most sum s_h <= alpha. Without the factor
(R + 1) the same spends bound the chance of any false promotion in the window instead.

Source: Benjamini and Hochberg (1995) for the rate; the spending form follows LORD and generalized alpha
investing (Aharoni and Rosset 2014; Javanmard and Montanari 2018).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

ErrorRate: TypeAlias = Literal["fdr", "fwer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """State of the current window before its next look.

    ``alpha`` in (0, 1) is the bound over the window, ``looks`` >= 1 the planned number J of looks, ``used``
    the looks taken in this window, ``promotions`` R those of them that promoted, ``window`` the number of the
    window from 1. ``spend`` is s, the same for every look of the window; None divides alpha evenly.
    """

    alpha: float = 0.10
    looks: int = 13
    error_rate: ErrorRate = "fdr"
    used: int = 0
    promotions: int = 0
    window: int = 1
    spend: float | None = None

    def __post_init__(self) -> None:
        """Refuse states that no sequence of looks leads to."""
        if not 0.0 < self.alpha < 1.0 or self.looks < 1:
            raise ValueError(
                f"alpha = {self.alpha!r}, looks = {self.looks!r}: alpha in (0, 1), looks >= 1 are accepted"
            )
        if self.error_rate not in ("fdr", "fwer"):
            raise ValueError(f"error_rate = {self.error_rate!r}; 'fdr' and 'fwer' are accepted")
        if not 0 <= self.promotions <= self.used < self.looks or self.window < 1:
            raise ValueError(
                f"used = {self.used!r}, promotions = {self.promotions!r}, window = {self.window!r}: "
                f"0 <= promotions <= used < looks ({self.looks}) and window >= 1 are accepted"
            )
        if self.spend is not None and not 0.0 < self.spend <= self.alpha / self.looks:
            raise ValueError(f"spend = {self.spend!r}; a number in (0, alpha / looks] is accepted")

    @property
    def look(self) -> int:
        """Number of the next look in the window, 1 to ``looks``."""
        return self.used + 1

    @property
    def spend_per_look(self) -> float:
        """s_h of the next look."""
        return self.alpha / self.looks if self.spend is None else self.spend

    @property
    def level(self) -> float:
        """a_h, the level of the next look."""
        factor = self.promotions + 1 if self.error_rate == "fdr" else 1
        return min(self.alpha, self.spend_per_look * factor)

    def record(self, p: float, *, eligible: bool = True) -> tuple[float, bool, Ledger]:
        """Take a look.

        Args:
            p: p-value of the superiority test.
            eligible: every other condition of a promotion holds.

        Returns:
            The level of the look, whether it promotes, and the ledger for the look after it.
        """
        level = self.level
        promoted = eligible and p <= level
        return level, promoted, self.after(promoted=promoted)

    def after(self, *, promoted: bool) -> Ledger:
        """The ledger after a look with a known end; a full window is followed by a fresh one."""
        if self.look == self.looks:
            return replace(self, used=0, promotions=0, window=self.window + 1)
        return replace(self, used=self.look, promotions=self.promotions + promoted)

    def tightened(self, *, alpha: float, looks: int, error_rate: ErrorRate) -> Ledger:
        """This window under a policy that changed while it was open.

        Spends are promised before a window opens, so only a smaller one takes effect at once; a larger alpha,
        another number of looks or ``fdr`` instead of ``fwer`` waits for the next window. Before its first look
        a window simply takes the new values.
        """
        if self.used == 0:
            return Ledger(alpha=alpha, looks=looks, error_rate=error_rate, window=self.window)
        smallest = min(self.spend_per_look, alpha / looks, alpha / self.looks)
        stricter: ErrorRate = "fwer" if "fwer" in (self.error_rate, error_rate) else "fdr"
        return replace(self, alpha=min(self.alpha, alpha), spend=smallest, error_rate=stricter)
