"""The prefix cache, by the `cached_tokens` that it reports."""

from engine_api import IDS


async def test_cached_tokens_of_repeated_and_extended_prompts(engine):
    await engine.flush()
    assert (await engine.generate(max_new_tokens=4, temperature=0))["meta_info"]["cached_tokens"] == 0
    repeated = await engine.generate(max_new_tokens=4, temperature=0, ignore_eos=True)
    assert repeated["meta_info"]["cached_tokens"] == 39
    assert repeated["meta_info"]["cached_tokens_details"] == {"device": 39, "host": 0}
    extension = await engine.generate([*IDS, 1, 2, 3], max_new_tokens=1)
    assert extension["meta_info"]["cached_tokens"] == 40
    # the model never read the last sampled token, so its keys and values are not cached
    continued = await engine.generate([*IDS, *repeated["output_ids"], 7], max_new_tokens=1)
    assert continued["meta_info"]["cached_tokens"] == 43
    await engine.flush()
    fresh = (await engine.generate(max_new_tokens=1))["meta_info"]
    assert (fresh["cached_tokens"], fresh["cached_tokens_details"]) == (0, None)
