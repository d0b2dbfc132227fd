package worker

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strconv"

	"berth/image/blobindex"
	"berth/image/unpack"
	"berth/image/unpack/inflate"
	"berth/internal/jail"
	"berth/internal/jail/early"
)

// SpanArgs returns the arguments for the decompression of spans of a blob, whose tar has tarSize
// bytes. The process reads spans from standard input and writes their tars to standard output, one
// after another, until its input ends.
func SpanArgs(kind blobindex.Compression, tarSize int64) []string {
	return []string{toInflate, strconv.Itoa(int(kind)), strconv.FormatInt(tarSize, 10)}
}

// spanHeap is Go's memory limit. It suffices for a span, its tar, the largest zstd window, and
// garbage.
const spanHeap = heapBase + blobindex.MaxIn + blobindex.MaxSpan + inflate.MaxWindow

func runSpans(args []string, root *os.File) error {
	if len(args) != 3 {
		return fmt.Errorf("%d arguments", len(args))
	}
	kind, err := strconv.ParseUint(args[1], 10, 8)
	if err != nil {
		return err
	}
	tarSize, err := strconv.ParseInt(args[2], 10, 64)
	if err != nil {
		return err
	}
	debug.SetMemoryLimit(spanHeap)
	grant := jail.Grant{
		Memory: min(memoryLimit, addresses+2*spanHeap), Files: fileLimit, OnlyData: true,
		CPU: uint64(CPULimit(unpack.Limits{Tar: tarSize}).Seconds()),
	}
	if err := jail.Process(root, grant, early.Done); err != nil {
		return err
	}
	return answerSpans(os.Stdin, os.Stdout, blobindex.Compression(kind))
}

// answerSpans decompresses spans until the input ends. Its memory depends on the largest span.
func answerSpans(from io.Reader, to io.Writer, kind blobindex.Compression) error {
	var buf bytes.Buffer
	var tar []byte
	for {
		p, size, in, err := readSpan(from, &buf)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if int64(cap(tar)) < size {
			tar = make([]byte, size)
		}
		tar = tar[:size]
		if err := inflate.Span(kind, &p, in, tar, inflate.MaxWindow); err != nil {
			if err := NewWriter(to).Error(unpack.DataLoss, err.Error()); err != nil {
				return err
			}
			continue
		}
		if err := writeTar(to, tar); err != nil {
			return err
		}
	}
}
