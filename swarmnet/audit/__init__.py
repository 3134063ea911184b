"""Audits: which peer computed wrongly, and the proof: commitments, samples, cases, evidence, receipts
(docs/trust.md)."""
