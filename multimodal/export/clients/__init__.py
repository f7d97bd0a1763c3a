"""Programs that use an export without torch. An export holds the one that fits it, so each stands alone."""
