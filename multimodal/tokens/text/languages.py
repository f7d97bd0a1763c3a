"""Whisper's languages in the order of their tokens (openai/whisper, MIT; see assets/vocabularies/LICENCE)."""

import re
from collections.abc import Mapping

from multimodal.errors import UsageError, did_you_mean

# code=name; the 100th, Cantonese, came with large-v3. The order is the ids' order: never sort it.
_TABLE = """
    en=english zh=chinese de=german es=spanish ru=russian ko=korean fr=french ja=japanese pt=portuguese
    tr=turkish pl=polish ca=catalan nl=dutch ar=arabic sv=swedish it=italian id=indonesian hi=hindi
    fi=finnish vi=vietnamese he=hebrew uk=ukrainian el=greek ms=malay cs=czech ro=romanian da=danish
    hu=hungarian ta=tamil no=norwegian th=thai ur=urdu hr=croatian bg=bulgarian lt=lithuanian la=latin
    mi=maori ml=malayalam cy=welsh sk=slovak te=telugu fa=persian lv=latvian bn=bengali sr=serbian
    az=azerbaijani sl=slovenian kn=kannada et=estonian mk=macedonian br=breton eu=basque is=icelandic
    hy=armenian ne=nepali mn=mongolian bs=bosnian kk=kazakh sq=albanian sw=swahili gl=galician
    mr=marathi pa=punjabi si=sinhala km=khmer sn=shona yo=yoruba so=somali af=afrikaans oc=occitan
    ka=georgian be=belarusian tg=tajik sd=sindhi gu=gujarati am=amharic yi=yiddish lo=lao uz=uzbek
    fo=faroese ht=haitian_creole ps=pashto tk=turkmen nn=nynorsk mt=maltese sa=sanskrit lb=luxembourgish
    my=myanmar bo=tibetan tl=tagalog mg=malagasy as=assamese tt=tatar haw=hawaiian ln=lingala ha=hausa
    ba=bashkir jw=javanese su=sundanese yue=cantonese
"""

UNSPACED = ("zh", "yue", "ja", "th", "lo", "my")  # written without spaces between words
# other names people use, name=code
_ALIASES = """
    burmese=my valencian=ca flemish=nl haitian=ht letzeburgesch=lb pushto=ps panjabi=pa moldavian=ro
    moldovan=ro sinhalese=si castilian=es mandarin=zh
    deutsch=de español=es français=fr italiano=it nederlands=nl polski=pl português=pt русский=ru
"""

LANGUAGES = {code: name.replace("_", " ") for code, name in (entry.split("=") for entry in _TABLE.split())}
_CODES = {name: code for code, name in LANGUAGES.items()} | dict(entry.split("=") for entry in _ALIASES.split())


# codes of NLLB-200 (ISO 639-3 and script) for Whisper's, where it has the language
_NLLB = """
    en=eng_Latn zh=zho_Hans de=deu_Latn es=spa_Latn ru=rus_Cyrl ko=kor_Hang fr=fra_Latn ja=jpn_Jpan pt=por_Latn
    tr=tur_Latn pl=pol_Latn ca=cat_Latn nl=nld_Latn ar=arb_Arab sv=swe_Latn it=ita_Latn id=ind_Latn hi=hin_Deva
    fi=fin_Latn vi=vie_Latn he=heb_Hebr uk=ukr_Cyrl el=ell_Grek ms=zsm_Latn cs=ces_Latn ro=ron_Latn da=dan_Latn
    hu=hun_Latn ta=tam_Taml no=nob_Latn th=tha_Thai ur=urd_Arab hr=hrv_Latn bg=bul_Cyrl lt=lit_Latn mi=mri_Latn
    ml=mal_Mlym cy=cym_Latn sk=slk_Latn te=tel_Telu fa=pes_Arab lv=lvs_Latn bn=ben_Beng sr=srp_Cyrl az=azj_Latn
    sl=slv_Latn kn=kan_Knda et=est_Latn mk=mkd_Cyrl eu=eus_Latn is=isl_Latn hy=hye_Armn ne=npi_Deva mn=khk_Cyrl
    bs=bos_Latn kk=kaz_Cyrl sq=als_Latn sw=swh_Latn gl=glg_Latn mr=mar_Deva pa=pan_Guru si=sin_Sinh km=khm_Khmr
    sn=sna_Latn yo=yor_Latn so=som_Latn af=afr_Latn oc=oci_Latn ka=kat_Geor be=bel_Cyrl tg=tgk_Cyrl sd=snd_Arab
    gu=guj_Gujr am=amh_Ethi yi=ydd_Hebr lo=lao_Laoo uz=uzn_Latn fo=fao_Latn ht=hat_Latn ps=pbt_Arab tk=tuk_Latn
    nn=nno_Latn mt=mlt_Latn sa=san_Deva lb=ltz_Latn my=mya_Mymr bo=bod_Tibt tl=tgl_Latn mg=plt_Latn as=asm_Beng
    tt=tat_Cyrl ln=lin_Latn ha=hau_Latn ba=bak_Cyrl jw=jav_Latn su=sun_Latn yue=yue_Hant
"""
NLLB = dict(entry.split("=") for entry in _NLLB.split())


def language_code(language: str) -> str:
    """Code ("de") of a language given by code or English name, in any case. Raises UsageError."""
    name = language.strip().lower()
    if name in LANGUAGES:
        return name
    if name in _CODES:
        return _CODES[name]
    problem = f"{language!r} is not one of Whisper's {len(LANGUAGES)}{did_you_mean(name, _CODES)}"
    raise UsageError(problem, argument="language")


LANGUAGE = re.compile(
    r"__(?P<m2m>[a-z]{2,3})__|(?P<nllb>[a-z]{3}_[A-Z][a-z]{3})|(?P<mbart>[a-z]{2,3}_[A-Z]{2})|>>(?P<marian>\w+)<<"
)
SENTINEL = re.compile(r"▁?<extra_id_(\d+)>")


def language_of(token: str) -> str | None:
    """Language of a special token, or None."""
    match = LANGUAGE.fullmatch(token)
    return next(filter(None, match.groups())) if match else None


def languages_of(names: Mapping[str, int]) -> dict[str, int]:
    """Id of each language among special tokens, in the order of ids."""
    ids = {code: i for name, i in names.items() if (code := language_of(name)) is not None}
    return dict(sorted(ids.items(), key=lambda pair: pair[1]))


def sentinels_of(names: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of `<extra_id_0>`, `<extra_id_1>`, …"""
    ids = {int(match[1]): i for name, i in names.items() if (match := SENTINEL.fullmatch(name))}
    return tuple(ids[number] for number in sorted(ids))
