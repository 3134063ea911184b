"""Who did wrong, and how it is proven: pledges, draws, the court, evidence, receipts (docs/trust.md)."""
