package server

import (
	"iter"

	"google.golang.org/protobuf/proto"
)

// batchBytes bounds what one message of a streaming list holds: far below
// MaxMessage, so that neither side buffers much, and far above an item, so that
// hundreds of pods need one or two messages.
const batchBytes = 1 << 20

// sendBatches answers a streaming list (KEP-5825): it hands items to send in
// their order, each exactly once, in batches of at least one item and at most
// batchBytes (an item larger than that is a batch of its own). Without items it
// sends nothing. The handler returns what it returns: nil closes the stream with
// EOF, an error of send means that the client is gone or has given up.
//
// items may make the items one by one; a batch is sent before the next one is made.
func sendBatches[T proto.Message](items iter.Seq[T], send func([]T) error) error {
	return inBatches(items, func(item T) int { return proto.Size(item) }, send)
}

// inBatches is sendBatches of items whose size in bytes is known otherwise.
func inBatches[T any](items iter.Seq[T], sizeOf func(T) int, send func([]T) error) error {
	var batch []T
	size := 0
	for item := range items {
		bytes := sizeOf(item)
		if len(batch) > 0 && size+bytes > batchBytes {
			if err := send(batch); err != nil {
				return err
			}
			batch, size = nil, 0 // not cut: gRPC may still hold the message
		}
		batch, size = append(batch, item), size+bytes
	}
	if len(batch) == 0 {
		return nil
	}
	return send(batch)
}
