package registry

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/image/registry/registrytest"
	"berth/internal/errdefs"
)

// Documents that others accept are accepted, and errors name the field.
func TestLenientDocuments(t *testing.T) {
	good := manifestJSON(ociManifest, descriptor(ociConfig, sha256Of0, 1), descriptor(ociLayer, sha256Of1, 1))
	change := func(from, to string) string { return strings.Replace(good, from, to, 1) }
	for name, c := range map[string]struct{ data, contentType, text string }{
		"no schemaVersion":         {change(`"schemaVersion":2,`, ""), ociManifest, ""},
		"null schemaVersion":       {change(`"schemaVersion":2`, `"schemaVersion":null`), ociManifest, ""},
		"schemaVersion as text":    {change(`"schemaVersion":2`, `"schemaVersion":"2"`), ociManifest, ""},
		"schemaVersion 2.0":        {change(`"schemaVersion":2`, `"schemaVersion":2.0`), ociManifest, ""},
		"schemaVersion 3":          {change(`"schemaVersion":2`, `"schemaVersion":3`), ociManifest, `schema version "3"`},
		"schemaVersion 1 as text":  {change(`"schemaVersion":2`, `"schemaVersion":"1"`), ociManifest, "schema 1 is not supported"},
		"byte order mark":          {"\xef\xbb\xbf" + good, ociManifest, ""},
		"parameters of the type":   {good, `Application/vnd.oci.image.manifest.v1+json; charset="utf-8"`, ""},
		"malformed type":           {good, "application/json; charset", ""},
		"no type of the layer":     {change(fmt.Sprintf(`"mediaType":%q,`, ociLayer), ""), ociManifest, ""},
		"no type of the config":    {change(fmt.Sprintf(`"mediaType":%q,`, ociConfig), ""), ociManifest, ""},
		"unknown field":            {change("{", `{"x":[1],`), ociManifest, ""},
		"size as text":             {change(`"size":1}]`, `"size":"1"}]`), ociManifest, `field "layers.0.size" is not valid: number expected, not string`},
		"size with a fraction":     {change(`"size":1}]`, `"size":1.5}]`), ociManifest, `field "layers.0.size" is not valid: number expected, not number`},
		"layers are an object":     {change(`"layers":[`, `"layers":{"a":[`) + "}", ociManifest, `field "layers" is not valid: array expected, not object`},
		"digest is a number":       {change(fmt.Sprintf("%q", sha256Of1), "1"), ociManifest, `field "layers.0.digest" is not valid: string expected, not number`},
		"a list":                   {"[]", ociManifest, "the document is not valid: object expected, not array"},
		"nothing":                  {" \n", ociManifest, "it is empty"},
		"UTF-16":                   {"\xff\xfe{\x00", ociManifest, "invalid JSON: byte 1"},
		"two documents":            {good + good, ociManifest, "invalid JSON: byte " + fmt.Sprint(len(good)+1)},
		"cut off":                  {good[:50], ociManifest, "unexpected end"},
		"an error of the registry": {`{"errors":[{"code":"UNKNOWN"}]}`, "application/json", "either manifests or a config"},
	} {
		_, err := parseDocument([]byte(c.data), c.contentType)
		if c.text == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(fmt.Sprint(err), c.text) {
			t.Errorf("%s: %v; want %q", name, err, c.text)
		}
	}
	_, _, err := parseConfig([]byte(`{"config":{"Cmd":"sh"}}`), nil)
	wantText(t, err, `field "config.Cmd" is not valid: array expected, not string`)
	_, _, err = parseConfig([]byte(`{"created":"yesterday"}`), nil)
	wantText(t, err, "a field is not valid", "yesterday")
}

func gzipOf(t *testing.T, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Some hosts serve documents with a Content-Encoding that nobody has requested.
func TestEncodedDocuments(t *testing.T) {
	layer := []byte("layer")
	for name, c := range map[string]struct {
		encoding string
		pack     func([]byte) []byte
		code     codes.Code
		text     string
	}{
		"gzip":             {"gzip", func(b []byte) []byte { return gzipOf(t, b) }, codes.OK, ""},
		"x-gzip":           {"X-GZIP", func(b []byte) []byte { return gzipOf(t, b) }, codes.OK, ""},
		"gzip without say": {"", func(b []byte) []byte { return gzipOf(t, b) }, codes.OK, ""},
		"plain, said gzip": {"gzip", bytes.Clone, codes.OK, ""},
		"identity":         {"identity", bytes.Clone, codes.OK, ""},
		"zstd, but plain":  {"zstd", bytes.Clone, codes.OK, ""}, // the digest is right
		"zstd":             {"zstd", func(b []byte) []byte { return append([]byte{0x28, 0xb5, 0x2f, 0xfd}, b...) }, codes.FailedPrecondition, `Content-Encoding "zstd"`},
		"deflate":          {"deflate", func(b []byte) []byte { return append([]byte{0x78, 0x9c}, b...) }, codes.FailedPrecondition, `Content-Encoding "deflate"`},
		"cut gzip":         {"gzip", func(b []byte) []byte { return gzipOf(t, b)[:20] }, codes.DataLoss, "decompress"},
		"other content":    {"gzip", func(b []byte) []byte { return gzipOf(t, append(b, ' ')) }, codes.DataLoss, "digest of the content"},
		"bomb":             {"gzip", func(b []byte) []byte { return gzipOf(t, make([]byte, MaxManifestSize+1)) }, codes.FailedPrecondition, "larger than the limit"},
	} {
		reg := registrytest.New(t)
		top := putImage(reg, "app", "v1", layer)
		reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
			answer := reg.Answer(r)
			if answer.Code == http.StatusOK && answer.Header().Get("Content-Type") == ociManifest {
				w.Header().Set("Docker-Content-Digest", top.Digest.String())
			}
			w.Header().Set("Content-Encoding", c.encoding)
			_, _ = w.Write(c.pack(answer.Body.Bytes()))
			return true
		}
		img, err := resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{}) // manifest and config
		wantCode(t, err, c.code)
		if c.code != codes.OK {
			wantText(t, err, c.text)
		}
		if err == nil && (img.Digest != top.Digest || digest.FromBytes(img.Documents[0].Raw) != top.Digest) {
			t.Errorf("%s: digest %s", name, img.Digest)
		}
		if t.Failed() {
			t.Fatal(name)
		}
	}
}

// A manifest may lack the size of a layer, as those of nix2container#207. Then the registry tells
// it.
func TestLayerWithoutSize(t *testing.T) {
	layer := []byte("layer")
	for _, empty := range []bool{false, true} {
		reg := registrytest.New(t)
		if empty {
			layer = nil
		}
		blob, config := reg.PutBlob("app", layer), reg.PutBlob("app", []byte(`{"os":"linux","rootfs":{"diff_ids":["`+sha256Of1+`"]}}`))
		reg.PutManifest("app", "v1", ociManifest, []byte(manifestJSON(ociManifest, descriptor(ociConfig, config.Digest.String(), config.Size),
			fmt.Sprintf(`{"mediaType":%q,"digest":%q}`, ociLayer, blob.Digest))))
		repo := open(t, Config{}, reg.Host()+"/app:v1", Credentials{})
		img, err := repo.Resolve(t.Context(), DefaultPlatform())
		if err != nil {
			t.Fatal(err)
		}
		if got, err := readBlob(t, repo, img.Layers[0].Blob); err != nil || !bytes.Equal(got, layer) {
			t.Errorf("%q, %v", got, err)
		}
		if heads := reg.Count("HEAD"); empty != (heads == 0) {
			t.Errorf("asked for the size of an empty layer (%v) %d times", empty, heads)
		}
		reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodHead {
				w.WriteHeader(http.StatusNotFound)
			}
			return r.Method == http.MethodHead
		}
		_, err = open(t, Config{}, reg.Host()+"/app:v1", Credentials{}).Resolve(t.Context(), DefaultPlatform())
		if !empty {
			wantCode(t, err, codes.NotFound, "layer 0", blob.Digest.String(), "its size is missing or 0 in the manifest")
		}
	}
	_, err := parseDocument([]byte(manifestJSON(ociManifest, descriptor("application/vnd.example", sha256Of0, 1), descriptor("text/plain", sha256Of1, 0))), "")
	wantCode(t, err, codes.FailedPrecondition, "blob 0", sha256Of1, "its size is missing or 0")
}

func TestRetryAfter(t *testing.T) {
	now := time.Now().UTC().Truncate(time.Second)
	at := func(d time.Duration) string { return now.Add(d).Format(http.TimeFormat) }
	for name, c := range map[string]struct {
		value, date string
		want        time.Duration
	}{
		"none": {"", "", 0}, "seconds": {"5", "", 5 * time.Second}, "zero": {"0", "", 0}, "negative": {"-5", "", 0}, "a fraction": {"1.5", "", 1500 * time.Millisecond},
		"infinite": {"Inf", "", 24 * time.Hour}, "no number": {"NaN", "", 0}, "huge": {"1e300", "", 24 * time.Hour}, "text": {"soon", "", 0},
		"date":                {at(5 * time.Second), at(0), 5 * time.Second},
		"in the past":         {at(-time.Hour), at(0), 0},
		"in a year":           {at(365 * 24 * time.Hour), at(0), 24 * time.Hour},
		"another clock":       {at(3*time.Hour + 5*time.Second), at(3 * time.Hour), 5 * time.Second},
		"RFC 850":             {now.Add(5 * time.Second).Format("Monday, 02-Jan-06 15:04:05 GMT"), at(0), 5 * time.Second},
		"C":                   {now.Add(5 * time.Second).Format(time.ANSIC), at(0), 5 * time.Second},
		"not a date in HTTP":  {now.Add(time.Hour).Format(time.RFC3339), at(0), 0},
		"date without a Date": {time.Now().Add(-time.Minute).UTC().Format(http.TimeFormat), "", 0},
	} {
		h := http.Header{}
		h.Set("Retry-After", c.value)
		if c.date != "" {
			h.Set("Date", c.date)
		}
		if got := retryAfter(h); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// A registry that asks for a long pause is not asked again by this pull.
func TestLongRetryAfter(t *testing.T) {
	reg := registrytest.New(t)
	reg.Before = func(w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("Retry-After", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat))
		w.WriteHeader(http.StatusTooManyRequests)
		return true
	}
	_, err := resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{})
	wantUnavailable(t, err, "429 Too Many Requests, retry after 1h0m0s")
	_, err = readBlob(t, open(t, Config{}, reg.Host()+"/app:v1", Credentials{}), ocispec.Descriptor{Digest: sha256Of0, Size: 1})
	wantUnavailable(t, err, "retry after 1h0m0s")
	if n := reg.Count(""); n != 2 {
		t.Errorf("it was asked %d times", n)
	}
}

// Only the token of a token server's answer is needed.
func TestTokenAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		body, encoding, text string
	}{
		"token":                {`{"token":"T"}`, "", ""},
		"access_token":         {`{"access_token":"T"}`, "", ""},
		"both":                 {`{"token":"T","access_token":"U"}`, "", ""},
		"expires_in as text":   {`{"token":"T","expires_in":"300"}`, "", ""},
		"expires_in is broken": {`{"token":"T","expires_in":3e2,"issued_at":0,"refresh_token":null}`, "", ""},
		"byte order mark":      {"\xef\xbb\xbf" + `{"token":"T"}`, "", ""},
		"gzip":                 {string(gzipOf(t, []byte(`{"token":"T"}`))), "gzip", ""},
		"zstd":                 {"\x28\xb5\x2f\xfd", "zstd", `Content-Encoding "zstd"`},
		"number":               {`{"token":123456}`, "", `field "token" is not valid: string expected, not number`},
		"no token":             {`{"token":""}`, "", "its response has no token"},
		"a page":               {"<html>T</html>", "text/html", "Content-Encoding"},
	} {
		reg := registrytest.New(t)
		putImage(reg, "app", "v1", []byte("x"))
		requireToken(reg, reg.URL+"/token_server")
		next := reg.Before
		reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path == "/token_server" {
				w.Header().Set("Content-Encoding", c.encoding)
				_, _ = w.Write([]byte(c.body))
				return true
			}
			return next(w, r)
		}
		_, err := resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{})
		if c.text == "" && err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if c.text != "" {
			wantCode(t, err, codes.Unauthenticated, "token server", c.text)
		}
		if err != nil && strings.Contains(err.Error(), "123456") {
			t.Errorf("%s: the error quotes the answer: %v", name, err)
		}
	}
}
