package worker

import (
	"bytes"
	"errors"
	"io"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"berth/image/unpack"
	"berth/image/unpack/checksum"
)

func sample() unpack.Result {
	r := unpack.Result{Digest: digest.FromString("x"), TarBytes: 1 << 40}
	r.Links = []unpack.Link{{Name: "a/b", Target: "c\n\xff"}}
	r.Implied = []unpack.Name{"", "d/e"}
	r.Opaques = []unpack.Name{"f"}
	r.Usage = unpack.Usage{Bytes: 1 << 41, Inodes: 7}
	r.Opaque, r.Whiteouts, r.Unsupported = true, 3, 4
	r.Sum = checksum.Sum{1, 2, 3, 1<<64 - 1}
	return r
}

// sent returns the bytes that send writes.
func sent(t testing.TB, send ...func(*Writer) error) []byte {
	t.Helper()
	var b bytes.Buffer
	w := NewWriter(&b)
	for _, s := range send {
		if err := s(w); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

func gunzip(name string) func(*Writer) error {
	return func(w *Writer) error { w.Gunzip(name); return nil }
}

func result(r unpack.Result) func(*Writer) error {
	return func(w *Writer) error { return w.Result(r) }
}

func progress(n int64) func(*Writer) error {
	return func(w *Writer) error { return w.Progress(n) }
}

func failure(code unpack.Code, text string) func(*Writer) error {
	return func(w *Writer) error { return w.Error(code, text) }
}

func TestResult(t *testing.T) {
	var sum int64
	r := NewReader(bytes.NewReader(sent(t, gunzip("Go\n"), progress(5), progress(5), progress(100), result(sample()))))
	got, err := r.Result(func(n int64) { sum += n })
	if r.Gunzip() != "Go\uFFFD" {
		t.Errorf("gunzip %q", r.Gunzip())
	}
	if err != nil || !reflect.DeepEqual(got, sample()) || sum != 100 {
		t.Errorf("%+v, %v, progress %d", got, err, sum)
	}
}

func TestError(t *testing.T) {
	text := "entry \"a\x1b[31m\n\": " + strings.Repeat("x", 10_000)
	_, err := NewReader(bytes.NewReader(sent(t, failure(unpack.FailedPrecondition, text)))).Result(nil)
	if unpack.CodeOf(err) != unpack.FailedPrecondition || strings.ContainsAny(err.Error(), "\x1b\n") || len(err.Error()) > 2*maxText {
		t.Errorf("%v", err)
	}
}

// A full disk is known as such on the other side.
func TestFullDiskIsReported(t *testing.T) {
	full := &os.PathError{Op: "write", Path: "file", Err: unix.ENOSPC}
	_, err := NewReader(bytes.NewReader(sent(t, failure(unpack.CodeOf(full), full.Error())))).Result(nil)
	if !errors.Is(err, unix.ENOSPC) || unpack.CodeOf(err).Status() != unpack.ResourceExhausted {
		t.Errorf("%v", err)
	}
	_, err = NewReader(bytes.NewReader(sent(t, failure(unpack.FailedPrecondition, "too many files")))).Result(nil)
	if errors.Is(err, unix.ENOSPC) {
		t.Errorf("%v matches ENOSPC", err)
	}
}

// Messages that no honest berth-unpack sends.
func TestMalformed(t *testing.T) {
	with := func(change func(*unpack.Result)) []byte {
		r := sample()
		change(&r)
		return sent(t, result(r))
	}
	for name, data := range map[string][]byte{
		"nothing":                 nil,
		"half":                    sent(t, result(sample()))[:20],
		"long":                    {'P', 0xff, 0xff, 0xff, 0xff},
		"unknown":                 {'x', 0, 0, 0, 0},
		"gunzip without end":      sent(t, gunzip(strings.Repeat("x", maxGunzip+1)), result(sample())),
		"no number":               {'P', 0, 0, 0, 1, 0x80},
		"progress backwards":      sent(t, progress(7), progress(6)),
		"progress beyond measure": sent(t, progress(-1)),
		"link without target":     {'L', 0, 0, 0, 1, 'a'},
		"name leads out":          with(func(r *unpack.Result) { r.Opaques = []unpack.Name{"../x"} }),
		"link leads out":          with(func(r *unpack.Result) { r.Links[0].Target = "/etc/passwd" }),
		"no digest":               with(func(r *unpack.Result) { r.Digest = "sha256:../../x" }),
		"negative length":         with(func(r *unpack.Result) { r.TarBytes = -1 }),
		"usage beyond measure":    with(func(r *unpack.Result) { r.Bytes = 1 << 63 }),
		"whiteouts beyond measure": with(func(r *unpack.Result) {
			r.Whiteouts = 1 << 40
		}),
		"success is no error":      sent(t, failure(unpack.OK, "x")),
		"a code of somebody else":  sent(t, failure(unpack.Code(16), "x")),
		"names without end":        bytes.Repeat(append([]byte{'I', 0, 0, 0x10, 0}, bytes.Repeat([]byte("x"), 4096)...), 2000),
		"empty names without end":  bytes.Repeat([]byte{'I', 0, 0, 0, 0}, unpack.MaxTold/unpack.PerName+1),
		"empty messages in a pile": bytes.Repeat([]byte{'R', 0, 0, 0, 0}, 3),
	} {
		got, err := NewReader(bytes.NewReader(data)).Result(func(int64) {})
		if err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if _, err := NewReader(strings.NewReader("P\x00")).Result(nil); !errors.Is(err, ErrEnded) {
		t.Errorf("an end in a header: %v", err)
	}
}

// FuzzReader: for any input the answer is an error, or a valid result that encodes and decodes to
// the same value.
func FuzzReader(f *testing.F) {
	f.Add(sent(f, gunzip("ISA-L"), progress(5), result(sample())))
	f.Add(sent(f, failure(unpack.InvalidArgument, "entry")))
	f.Add([]byte("L\x00\x00\x00\x03a\x00bR\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var sum int64
		got, err := NewReader(bytes.NewReader(data)).Result(func(n int64) {
			if sum += n; n < 0 || sum > maxBytes {
				t.Fatalf("progress by %d to %d", n, sum)
			}
		})
		if err != nil {
			var reported *unpack.Error
			if errors.As(err, &reported) && (reported.Code == unpack.OK || len(err.Error()) > 4*maxText) {
				t.Fatalf("%v: %v", reported.Code, err)
			}
			return
		}
		if err := got.Check(); err != nil || got.Digest.Validate() != nil || got.TarBytes < 0 || got.Bytes > maxBytes || got.Whiteouts < 0 {
			t.Fatalf("%+v: %v", got, err)
		}
		again, err := NewReader(io.MultiReader(bytes.NewReader(sent(t, result(got))))).Result(func(int64) {})
		if err != nil || !reflect.DeepEqual(again, got) {
			t.Fatalf("%+v became %+v: %v", got, again, err)
		}
	})
}
