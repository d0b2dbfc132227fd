package worker

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"unicode"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"berth/image/unpack"
	"berth/image/unpack/checksum"
	"berth/internal/frame"
)

// Version changes with every change of the arguments and messages.
const Version = "10"

// Kinds of messages. A message is a frame (package frame). Names come first. The last message is an
// error or the summary.
const (
	kindGunzip   = 'G' // name of what reads gzip
	kindProgress = 'P' // bytes of the tar read so far
	kindLink     = 'L' // name, zero, target
	kindImplied  = 'I' // name
	kindOpaque   = 'O' // name
	kindResult   = 'R' // see appendSummary
	kindError    = 'E' // code and text
)

const (
	// maxBody is the size of the largest body, the body of a link.
	maxBody = 2*unix.PathMax + 1
	maxText = 4 << 10
	// maxGunzip limits the name of the gzip implementation.
	maxGunzip = 16
	// maxBytes is larger than any real size of a layer. Sums of a few such numbers cannot overflow.
	maxBytes = 1 << 56
)

// Writer sends messages. It is not safe for concurrent use.
type Writer struct{ w *bufio.Writer }

// NewWriter returns a Writer to w.
func NewWriter(w io.Writer) *Writer { return &Writer{bufio.NewWriterSize(w, 64<<10)} }

func (w *Writer) put(kind byte, body []byte) {
	_, _ = w.w.Write(frame.AppendHeader(w.w.AvailableBuffer(), kind, len(body))) // Flush returns the error of both
	_, _ = w.w.Write(body)
}

// Gunzip reports gzip's decompressor by its name from inflate.Gunzip. The name is sent with the
// next message of another kind.
func (w *Writer) Gunzip(name string) { w.put(kindGunzip, []byte(name)) }

// Progress reports how many bytes of the tar have been read.
func (w *Writer) Progress(tarBytes int64) error {
	w.put(kindProgress, binary.AppendUvarint(nil, uint64(tarBytes)))
	return w.w.Flush()
}

// Result sends the result of the layer.
func (w *Writer) Result(r unpack.Result) error {
	for _, l := range r.Links {
		w.put(kindLink, []byte(string(l.Name)+"\x00"+string(l.Target)))
	}
	for _, name := range r.Implied {
		w.put(kindImplied, []byte(name))
	}
	for _, name := range r.Opaques {
		w.put(kindOpaque, []byte(name))
	}
	w.put(kindResult, appendSummary(nil, r))
	return w.w.Flush()
}

// Error sends the reason of a failure.
func (w *Writer) Error(code unpack.Code, text string) error {
	w.put(kindError, append(binary.AppendUvarint(nil, uint64(code)), text[:min(len(text), maxText)]...))
	return w.w.Flush()
}

func appendSummary(b []byte, r unpack.Result) []byte {
	opaque := uint64(0)
	if r.Opaque {
		opaque = 1
	}
	for _, n := range []uint64{uint64(r.TarBytes), r.Bytes, r.Inodes, opaque, uint64(r.Whiteouts), uint64(r.Unsupported)} {
		b = binary.AppendUvarint(b, n)
	}
	b = append(b, r.Sum.Bytes()...)
	return append(b, r.Digest...)
}

// Reader receives messages from a process that is not trusted. It takes memory for at most
// unpack.MaxTold bytes of names and for one message. It validates its results: names are clean and
// limited, and numbers are in range. An error has a code that a layer can cause, and a short
// printable text. It cannot check whether the result is true.
type Reader struct {
	r    *bufio.Reader
	body [maxBody]byte
	told unpack.Contents
	left int // bytes of names that may still come

	gunzip string
}

// NewReader returns a Reader from r.
func NewReader(r io.Reader) *Reader {
	return &Reader{r: bufio.NewReaderSize(r, 16<<10), left: unpack.MaxTold}
}

// Gunzip returns the name of the gzip implementation, empty if it was not reported.
func (r *Reader) Gunzip() string { return r.gunzip }

// ErrEnded is returned by Result when the messages end before the last one.
var ErrEnded = errors.New("the messages end before the result")

// Result reads to the last message. progress is called with the number of newly read bytes of the
// tar. An error that the sender reports is an *unpack.Error.
func (r *Reader) Result(progress func(n int64)) (unpack.Result, error) {
	tarBytes := uint64(0)
	for {
		kind, body, err := r.next()
		if err != nil {
			return unpack.Result{}, err
		}
		switch kind {
		case kindGunzip:
			if len(body) > maxGunzip {
				return unpack.Result{}, malformed(kind, body)
			}
			r.gunzip = printable(string(body))
		case kindProgress:
			n, rest := number(body)
			if rest == nil || len(rest) > 0 || n < tarBytes || n > maxBytes {
				return unpack.Result{}, malformed(kind, body)
			}
			progress(int64(n - tarBytes))
			tarBytes = n
		case kindLink, kindImplied, kindOpaque:
			if err := r.name(kind, string(body)); err != nil {
				return unpack.Result{}, err
			}
		case kindResult:
			return r.summary(body)
		case kindError:
			return unpack.Result{}, reported(body)
		default:
			return unpack.Result{}, malformed(kind, body)
		}
	}
}

// next reads one frame. The body is valid until the next call.
func (r *Reader) next() (kind byte, body []byte, err error) {
	kind, body, err = frame.Read(r.r, r.body[:])
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = ErrEnded
	}
	return kind, body, err
}

func malformed(kind byte, body []byte) error {
	return fmt.Errorf("a malformed message %q: %.50q", kind, body)
}

// name keeps a name. Contents.Check validates the names at the end.
func (r *Reader) name(kind byte, body string) error {
	if r.left -= len(body) + unpack.PerName; r.left < 0 {
		return fmt.Errorf("more than %d bytes of names", unpack.MaxTold)
	}
	switch kind {
	case kindImplied:
		r.told.Implied = append(r.told.Implied, unpack.Name(body))
	case kindOpaque:
		r.told.Opaques = append(r.told.Opaques, unpack.Name(body))
	case kindLink:
		name, target, ok := strings.Cut(body, "\x00")
		if !ok {
			return malformed(kind, []byte(body))
		}
		r.told.Links = append(r.told.Links, unpack.Link{Name: unpack.Name(name), Target: unpack.Name(target)})
	}
	return nil
}

// summary reads what appendSummary wrote.
func (r *Reader) summary(body []byte) (unpack.Result, error) {
	var numbers [6]uint64
	rest := body
	for i := range numbers {
		if numbers[i], rest = number(rest); rest == nil || numbers[i] > maxBytes {
			return unpack.Result{}, malformed(kindResult, body)
		}
	}
	if len(rest) < checksum.Size {
		return unpack.Result{}, malformed(kindResult, body)
	}
	sum, rest := checksum.FromBytes([checksum.Size]byte(rest)), rest[checksum.Size:]
	result := unpack.Result{Digest: digest.Digest(rest), TarBytes: int64(numbers[0]), Contents: r.told}
	result.Usage = unpack.Usage{Bytes: numbers[1], Inodes: numbers[2]}
	result.Opaque, result.Sum = numbers[3] == 1, sum
	if result.Digest.Validate() != nil || numbers[3] > 1 || numbers[4] > math.MaxInt32 || numbers[5] > math.MaxInt32 {
		return unpack.Result{}, malformed(kindResult, body)
	}
	result.Whiteouts, result.Unsupported = int(numbers[4]), int(numbers[5])
	return result, result.Check()
}

// number decodes a number of b; the rest is nil if b does not start with a number.
func number(b []byte) (n uint64, rest []byte) {
	n, size := binary.Uvarint(b)
	if size <= 0 {
		return 0, nil
	}
	return n, b[size:]
}

// reported returns the sender's error.
func reported(body []byte) error {
	n, text := number(body)
	if text == nil || len(text) > maxText {
		return malformed(kindError, body)
	}
	code := unpack.Code(min(n, math.MaxUint32))
	switch code {
	case unpack.InvalidArgument, unpack.FailedPrecondition, unpack.MoreWindow, unpack.MoreMemory, unpack.OutOfRange, unpack.NoSpace, unpack.DataLoss, unpack.Internal, unpack.Unknown:
	default:
		return malformed(kindError, body)
	}
	return &unpack.Error{Code: code, Err: errors.New(printable(string(text)))}
}

// printable replaces unprintable characters.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, text)
}
