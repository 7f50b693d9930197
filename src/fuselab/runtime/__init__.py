"""How implementations are built, cached, launched and chosen."""
