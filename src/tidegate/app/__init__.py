"""The composition root: it alone constructs stores, engines and stages."""
