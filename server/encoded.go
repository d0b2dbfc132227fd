package server

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"berth/sandbox/view"
)

// itemsField is the number of the field that has the items, in ListContainersResponse and ListPodSandboxResponse.
const itemsField = 1

// encodedItems returns the encoding of a list's answer. That of a repeated field is that of its items, one after the other, so items
// that were in an earlier answer are copied from where they were kept (keep; nil: nowhere) and neither made nor encoded again. In a message
// they are its unknown fields, which are sent as they are: to the client it makes no difference.
func encodedItems[Snapshot any, Item proto.Message](all []Snapshot, keep func(Snapshot) *view.Answer, item func(Snapshot) Item) ([]byte, error) {
	items, size := make([][]byte, 0, len(all)), 0
	for _, snapshot := range all {
		encoded, err := keep(snapshot).Get(func() ([]byte, error) { return encodedItem(item(snapshot)) })
		if err != nil {
			return nil, err
		}
		items, size = append(items, encoded), size+len(encoded)
	}
	list := make([]byte, 0, size)
	for _, encoded := range items {
		list = append(list, encoded...)
	}
	return list, nil
}

// encodedItem is an item with its field's number and its length before it.
func encodedItem(item proto.Message) ([]byte, error) {
	size := proto.Size(item)
	encoded := make([]byte, 0, protowire.SizeTag(itemsField)+protowire.SizeBytes(size))
	encoded = protowire.AppendVarint(protowire.AppendTag(encoded, itemsField, protowire.BytesType), uint64(size))
	encoded, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(encoded, item)
	if err != nil {
		return nil, fmt.Errorf("encode an item of a list: %w", err)
	}
	return encoded, nil
}
