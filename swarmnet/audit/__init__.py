"""Who did wrong, and how it is proven: pledges, samples, cases, evidence, receipts (docs/trust.md)."""
