"""Who answers for which work, and what proves that it was wrong (docs/trust.md). Pure."""
