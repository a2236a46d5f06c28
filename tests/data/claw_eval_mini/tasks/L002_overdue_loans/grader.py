"""The English twin."""

from claw_eval.graders.base import load_peer_grader

_Base = load_peer_grader("L001zh_overdue_loans")


class OverdueLoansEnglish(_Base):
    REPORT_RUBRIC = "Says that LN-4102 and LN-4103 were reminded and LN-4101 was not: 1; else 0"
