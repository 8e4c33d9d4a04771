"""Durable memory: the ports of :mod:`tidegate.ports.stores` over SQLite or PostgreSQL, and over plain Python objects.

Everything is synchronous and thread-safe; a caller on an event loop uses a thread of its own.
"""
