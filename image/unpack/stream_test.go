package unpack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

func TestStream(t *testing.T) {
	for _, size := range []int{0, 1, chunkSize - 1, chunkSize, chunkSize + 1, 3*chunkSize + 5, 20 * chunkSize} {
		data := bytes.Repeat([]byte("0123456789abcdef!"), size/17+1)[:size]
		for name, src := range map[string]io.Reader{
			"whole": bytes.NewReader(data), "half": iotest.HalfReader(bytes.NewReader(data)), "data with EOF": iotest.DataErrReader(bytes.NewReader(data)),
		} {
			s := newStream(context.Background(), src, sha256.New(), int64(size), func(int) {})
			got, err := io.ReadAll(io.LimitReader(s, int64(size/2)))
			if err != nil || !bytes.Equal(got, data[:size/2]) {
				t.Errorf("%s, %d: read %d bytes, %v", name, size, len(got), err)
			}
			n, sum, err := s.finish()
			want := sha256.Sum256(data)
			if err != nil || n != int64(size) || !bytes.Equal(sum, want[:]) {
				t.Errorf("%s, %d: %d bytes, %v", name, size, n, err)
			}
			s.close()
		}
	}
}

func TestStreamErrors(t *testing.T) {
	broken := errors.New("broken")
	for _, want := range []error{broken, io.ErrUnexpectedEOF} {
		s := newStream(context.Background(), io.MultiReader(strings.NewReader("some"), iotest.ErrReader(want)), sha256.New(), 100, func(int) {})
		got, err := io.ReadAll(s)
		if string(got) != "some" || err != want {
			t.Errorf("%q, %v; want %v", got, err, want)
		}
		if _, _, err := s.finish(); err != want {
			t.Errorf("finish: %v; want %v", err, want)
		}
		s.close()
	}
	s := newStream(context.Background(), strings.NewReader("12345"), sha256.New(), 4, func(int) {})
	if _, err := io.ReadAll(s); CodeOf(err) != FailedPrecondition {
		t.Errorf("beyond the limit: %v", err)
	}
	s.close()
}

// close ends a stream that has no reader and full chunks.
func TestStreamClose(t *testing.T) {
	s := newStream(context.Background(), endless{}, sha256.New(), 1<<40, func(int) {})
	if _, err := s.Read(make([]byte, 1)); err != nil {
		t.Error(err)
	}
	s.close()
	if len(s.full)+len(s.free) != 0 {
		t.Error("chunks are left")
	}
}
