"""Islands: independent processes, one a replica, that meet in pairs over any network (design: no coordinator)."""
