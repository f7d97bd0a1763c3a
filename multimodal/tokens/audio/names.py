"""Which bytes begin a file of sound alone."""

MARKS = (b"fLaC", b"OggS", b"ID3", b"caff", b".snd", b"#!AMR", b"riff")  # riff: Sony Wave64


def starts_audio(head: bytes) -> bool:
    """Return True for WAV, FLAC, Ogg, MP3, AAC, AIFF, CAF, AU, AMR, M4A and Wave64."""
    if head[:4] in (b"RIFF", b"RF64", b"FORM"):
        return head[8:12] in (b"WAVE", b"AIFF", b"AIFC")
    if head[4:8] == b"ftyp":
        return head[8:12] in (b"M4A ", b"M4B ")
    frame = len(head) > 1 and head[0] == 0xFF and head[1] >= 0xE0  # of MPEG audio
    return frame or head.startswith(MARKS)
