package worker

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"testing"

	"berth/image/blobindex"
	"berth/image/unpack"
	"berth/internal/frame"
)

func TestSpanMessage(t *testing.T) {
	var c blobindex.WindowCompressor
	window, err := c.Compress([]byte("window"))
	if err != nil {
		t.Fatal(err)
	}
	var b, buf bytes.Buffer
	points := []blobindex.Point{{Start: true}, {In: 100, Out: 3000, Bits: 3, Byte: 0xa0, Window: window}}
	for i := range points {
		if err := WriteSpan(&b, &points[i], 5000, []byte("in")); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range points {
		p, out, in, err := readSpan(&b, &buf)
		if err != nil || !reflect.DeepEqual(p, want) || out != 5000 || string(in) != "in" {
			t.Errorf("%+v, %d, %q, %v", p, out, in, err)
		}
	}
	if _, _, _, err := readSpan(&b, &buf); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

func TestWrongTars(t *testing.T) {
	message := func(kind byte, body string) []byte { return append(frame.AppendHeader(nil, kind, len(body)), body...) }
	for name, tc := range map[string]struct {
		message []byte
		want    error
	}{
		"short":        {message(kindTar, "123"), ErrMalformed},
		"long":         {message(kindTar, "12345"), ErrMalformed},
		"huge":         {frame.AppendHeader(nil, kindTar, 1<<31), ErrMalformed},
		"another kind": {message(kindResult, "1234"), ErrMalformed},
		"no code":      {message(kindError, ""), ErrMalformed},
		"unknown code": {message(kindError, "\x7ftext"), ErrMalformed},
		"cut":          {message(kindTar, "1234")[:7], io.ErrUnexpectedEOF},
		"nothing":      {nil, io.EOF},
	} {
		if _, err := ReadTar(bytes.NewReader(tc.message), 4); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got, err := ReadTar(bytes.NewReader(message(kindTar, "1234")), 4); err != nil || string(got) != "1234" {
		t.Errorf("%q, %v", got, err)
	}
	long := string(bytes.Repeat([]byte("x"), 2*maxText))
	said := sent(t, failure(unpack.DataLoss, long))
	if _, err := ReadTar(bytes.NewReader(said), 4); unpack.CodeOf(err) != unpack.DataLoss {
		t.Error(err)
	}
}

// FuzzReadTar: any answer is the tar, an error of the sender or a violation of the protocol.
func FuzzReadTar(f *testing.F) {
	f.Add([]byte{kindTar, 0, 0, 0, 2, 'a', 'b'}, uint16(2))
	f.Add([]byte{kindError, 0, 0, 0, 2, 4, 'b'}, uint16(2))
	f.Fuzz(func(t *testing.T, message []byte, out uint16) {
		got, err := ReadTar(bytes.NewReader(message), int64(out))
		known := new(unpack.Error)
		if err == nil && len(got) != int(out) || err != nil && !errors.As(err, &known) && !errors.Is(err, ErrMalformed) &&
			!errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("%d bytes of %d, %v", len(got), out, err)
		}
	})
}

// FuzzReadSpan: any span that is accepted can be sent again.
func FuzzReadSpan(f *testing.F) {
	var b bytes.Buffer
	if err := WriteSpan(&b, &blobindex.Point{Start: true}, 100, []byte("in")); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, message []byte) {
		var buf, again, second bytes.Buffer
		p, out, in, err := readSpan(bytes.NewReader(message), &buf)
		if err != nil {
			return
		}
		if err := WriteSpan(&again, &p, out, in); err != nil {
			t.Fatal(err)
		}
		p2, out2, in2, err := readSpan(&again, &second)
		if err != nil || !reflect.DeepEqual(p, p2) || out != out2 || !bytes.Equal(in, in2) {
			t.Fatalf("%+v, %d, %d bytes, %v", p2, out2, len(in2), err)
		}
	})
}
