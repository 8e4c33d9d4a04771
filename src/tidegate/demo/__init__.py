"""The demonstration that ``make demo`` runs: users, cycles, a refusal and a rollback on one small model."""
