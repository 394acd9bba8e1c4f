"""S3: what the settings say of a bucket's address and of signatures."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gracepoint.checkpoint.storage.objects.object_store import object_path
from gracepoint.errors import SettingsError
from tests.unit.checkpoint.storage.fakes.unsent import KEYS, S3Settings, Unsent

AMAZON = "s3.eu-central-1.amazonaws.com"


@pytest.mark.parametrize(
    ("bucket", "environ", "config", "url"),
    [
        pytest.param("b-1", {}, "", f"https://b-1.{AMAZON}", id="Amazon"),
        pytest.param("b.1", {}, "", f"https://{AMAZON}/b.1", id="a dot"),
        pytest.param("b-1", {"AWS_REGION": "cn-north-1"}, "", "https://b-1.s3.cn-north-1.amazonaws.com.cn", id="China"),
        pytest.param("b-1", {"AWS_REGION": "us-east-1"}, "", "https://b-1.s3.us-east-1.amazonaws.com", id="the first"),
        pytest.param(
            "b-1",
            {"AWS_REGION": "us-gov-west-1", "AWS_USE_FIPS_ENDPOINT": "true"},
            "",
            "https://b-1.s3-fips.us-gov-west-1.amazonaws.com",
            id="FIPS",
        ),
        pytest.param(
            "b-1",
            {"AWS_REGION": "us-gov-west-1", "AWS_USE_FIPS_ENDPOINT": "true", "AWS_USE_DUALSTACK_ENDPOINT": "true"},
            "",
            "https://b-1.s3-fips.dualstack.us-gov-west-1.amazonaws.com",
            id="FIPS and dual-stack",
        ),
        pytest.param(
            "b.1",
            {"AWS_USE_DUALSTACK_ENDPOINT": "true"},
            "",
            f"https://{AMAZON.replace('.', '.dualstack.', 1)}/b.1",
            id="dual-stack and a dot",
        ),
        pytest.param(
            "b-1",
            {},
            "use_dualstack_endpoint = true",
            f"https://b-1.{AMAZON.replace('.', '.dualstack.', 1)}",
            id="dual-stack of the profile",
        ),
        pytest.param("ap-abcdef-s3alias", {}, "", f"https://ap-abcdef-s3alias.{AMAZON}", id="an access point"),
        pytest.param(
            "b-1",
            {"AWS_REGION": "", "AWS_DEFAULT_REGION": "eu-central-1"},
            "",
            f"https://b-1.{AMAZON}",
            id="the old name of the region",
        ),
        pytest.param(
            "b-1", {"AWS_REGION": ""}, "region = eu-central-1", f"https://b-1.{AMAZON}", id="the profile's region"
        ),
        pytest.param("b-1", {"AWS_ENDPOINT_URL": "http://Host:9/"}, "", "http://host:9/b-1", id="a server"),
        pytest.param(
            "b-1", {"AWS_ENDPOINT_URL": "http://[::1]:9"}, "", "http://[::1]:9/b-1", id="a server without a name"
        ),
        pytest.param(
            "b-1",
            {"AWS_ENDPOINT_URL": "http://general", "AWS_ENDPOINT_URL_S3": "http://host:9"},
            "endpoint_url = http://profile",
            "http://host:9/b-1",
            id="a server for S3 alone",
        ),
        pytest.param("b-1", {}, "endpoint_url = https://host:9", "https://host:9/b-1", id="the profile's server"),
        pytest.param(
            "b-1",
            {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true", "AWS_ENDPOINT_URL": "http://host"},
            "",
            f"https://b-1.{AMAZON}",
            id="an ignored server",
        ),
        pytest.param(
            "b.1",
            {"AWS_ENDPOINT_URL": "https://host:9/storage/v1/s3/"},
            "",
            "https://host:9/storage/v1/s3/b.1",
            id="a server with a path",
        ),
        pytest.param(
            "b-1",
            {"AWS_ENDPOINT_URL": "https://host", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
            "",
            "https://b-1.host",
            id="a server with virtual hosts",
        ),
        pytest.param(
            "b-1", {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false"}, "", f"https://{AMAZON}/b-1", id="Amazon by path"
        ),
        pytest.param("b-1", {}, "s3 =\n  addressing_style = path", f"https://{AMAZON}/b-1", id="the profile's style"),
        pytest.param(
            "b-1",
            {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
            "s3 =\n  addressing_style = path",
            f"https://b-1.{AMAZON}",
            id="the style of the environment",
        ),
        pytest.param(
            "b-1",
            {},
            "endpoint_url = http://host:9\ns3 =\n  addressing_style = virtual",
            "http://b-1.host:9",
            id="the profile's virtual hosts",
        ),
    ],
)
def test_all_clients_of_a_bucket_address_it_as_botocore_does(
    s3_settings: S3Settings, bucket: str, environ: dict[str, str], config: str, url: str
) -> None:
    api, exchange = s3_settings.bucket({**KEYS, "AWS_REGION": "eu-central-1", **environ}, bucket, config), Unsent()
    assert api.head(exchange, "run/k") is None
    assert (f"{api.connections.url}{exchange.sent[0].target}", api.url("k")) == (f"{url}/run/k", f"s3://{bucket}/k")
    spec = api.kvstore_spec("key")
    assert f"/{spec['aws_region']}/s3/aws4_request" in exchange.sent[0].headers["Authorization"]
    if url == f"https://{bucket}.s3.{spec['aws_region']}.amazonaws.com":
        assert (spec["bucket"], spec.get("endpoint")) == (bucket, None)  # TensorStore makes the same name
    else:
        assert "/".join((spec["endpoint"], spec["bucket"])).rstrip("/") == url


def test_the_service_and_region_of_a_signature_are_those_that_botocore_says(s3_settings: S3Settings) -> None:
    outpost, exchange = "test-accessp-o0b1d075431d83bebde8xz5w8ijx1qzlbp3i3kuse10--op-s3", Unsent()
    assert s3_settings.bucket({**KEYS, "AWS_REGION": "us-east-1"}, outpost).head(exchange, "k") is None
    assert "/us-east-1/s3-outposts/aws4_request" in exchange.sent[0].headers["Authorization"]
    exchange = Unsent()
    assert s3_settings.bucket({**KEYS, "AWS_ENDPOINT_URL": "http://host"}).head(exchange, "k") is None
    assert "/us-east-1/s3/aws4_request" in exchange.sent[0].headers["Authorization"]


@pytest.mark.parametrize(
    ("bucket", "environ", "config", "says"),
    [
        pytest.param("b-1", {}, "", "set AWS_REGION to the region of the bucket", id="no region"),
        pytest.param(
            "b-1",
            {"AWS_USE_FIPS_ENDPOINT": "true"},
            "",
            "set AWS_REGION to the region of the bucket",
            id="FIPS nowhere",
        ),
        pytest.param(
            "b-1", {"AWS_REGION": "cn-north-1", "AWS_USE_FIPS_ENDPOINT": "true"}, "", "does not support FIPS", id="FIPS"
        ),
        pytest.param("b 1", {"AWS_REGION": "us-east-1"}, "", "Invalid bucket name", id="a name"),
        pytest.param(
            "b-1", {"AWS_ENDPOINT_URL": "host:9"}, "", "the settings of its server cannot be used", id="no URL"
        ),
        pytest.param(
            "b-1", {"AWS_ENDPOINT_URL": "http://me:secret@host"}, "", "the URL of a server has a user", id="a user"
        ),
        pytest.param("b-1", {"AWS_PROFILE": "missing"}, "", r"profile \(missing\) could not be found", id="no profile"),
        pytest.param("b-1", {"AWS_REGION": "x"}, "s3 =\n  addressing_style = odd", "odd", id="the profile's style"),
        pytest.param(
            "b-1",
            {"AWS_REGION": "x", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "yes"},
            "",
            "expected true or false, found 'yes'",
            id="style",
        ),
        pytest.param(
            "b-1",
            {"AWS_REGION": "x", "AWS_SERVER_SIDE_ENCRYPTION": "kms"},
            "",
            "expected one of AES256",
            id="algorithm",
        ),
        pytest.param(
            "b-1", {"AWS_REGION": "x", "AWS_SSE_KMS_KEY_ID": "key"}, "", "are for AWS_SERVER_SIDE", id="a key"
        ),
    ],
)
def test_settings_of_s3_that_cannot_be_used_are_named(
    s3_settings: S3Settings, bucket: str, environ: dict[str, str], config: str, says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        s3_settings.bucket(environ, bucket, config)


def test_a_bucket_of_s3_needs_its_extra(s3_settings: S3Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)  # importing it is an error
    with pytest.raises(SettingsError, match=r"s3:// needs the extra 's3': pip install 'gracepoint\[s3\]'"):
        s3_settings.bucket({"AWS_REGION": "here"})


def test_another_setting_makes_another_back_end(s3_settings: S3Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_settings.bucket({**KEYS, "AWS_REGION": "here"})
    first = object_path("s3://bucket/run").store
    assert object_path("s3://bucket/run").store is first
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert object_path("s3://bucket/run").store is not first


@pytest.mark.integration
def test_botocore_is_imported_only_when_a_bucket_of_s3_is_opened() -> None:
    program = (
        "import sys; from gracepoint.checkpoint.storage.locations import storage_path; "
        "from gracepoint.checkpoint.storage.objects import object_store; "
        "storage_path('memory://a'); before = 'botocore' in sys.modules; storage_path('s3://bucket/run'); "
        "print(before, 'botocore' in sys.modules)"
    )
    environ = {**os.environ, "AWS_REGION": "here", "AWS_EC2_METADATA_DISABLED": "true"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"], done.stderr
