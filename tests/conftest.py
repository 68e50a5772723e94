"""For all tests: property tests never judge the time that something took, because a machine may be busy."""

from hypothesis import HealthCheck, settings

settings.register_profile("fleet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fleet")
