"""CA certificates in PEM text."""

from pseudoreal_api.wire.authorities import authorities_digest, certificates_in, trust_sets


def block(content: str) -> str:
    return f"-----BEGIN CERTIFICATE-----\n{content}\n-----END CERTIFICATE-----\n"


def test_text_beside_certificates_is_ignored() -> None:
    text = f"subject: Müller\n{block('QQ==')}\nissuer\n{block('Qg==')}{block('QQ==')}-----BEGIN CERTIFICATE-----\n"
    assert certificates_in(text) == [block("QQ=="), block("Qg==")]
    assert authorities_digest(text) == authorities_digest(block("QQ==") + "\n" + block("Qg=="))
    assert authorities_digest(text) != authorities_digest(block("QQ=="))


def test_client_tries_all_certificates_together_and_then_each_alone() -> None:
    one, two = block("QQ=="), block("Qg==")
    assert trust_sets(one + two) == [one + two, one, two]
    assert trust_sets(one) == [one]
    assert trust_sets("none") == []


def test_client_tries_at_most_eight_certificates_of_a_large_bundle_alone() -> None:
    assert len(trust_sets("".join(block(str(number)) for number in range(1000)))) == 9
