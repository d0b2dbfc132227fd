package proto

import (
	"encoding/binary"
	"errors"
	"os"
	"reflect"
	"time"
)

// Launches and execs have a compact encoding instead of JSON. In each launcher encoding/json would
// analyse the types of a whole runtime-spec for one message. The compact encoding has the values of
// all fields in the order of their declaration, without names. It reads the types as it goes.
//
// A sender and a receiver with other types would misunderstand each other. So a compact message
// begins with a checksum of the types. Messages that another version may receive are JSON: those of
// an exec that runs, because a process of sessions can adopt its connection.

// compactStart begins a compact message. JSON never begins with it.
const compactStart = 0

// layout is a checksum of the types in compact messages. TestLayout calculates it.
const layout uint64 = 0x4870895d25df5810

var errCompact = errors.New("it is damaged, or berth and berth-shim have different versions")

var (
	fileType  = reflect.TypeFor[*os.File]()
	filesType = reflect.TypeFor[[]*os.File]()
	timeType  = reflect.TypeFor[time.Time]()
)

// isSent returns whether fields of a type are sent. Files are sent beside a message. The only
// interface is for Windows.
func isSent(t reflect.Type) bool {
	return t != fileType && t != filesType && t.Kind() != reflect.Interface
}

// isCompact returns whether a message is sent in the compact encoding.
func isCompact(message any) bool {
	switch m := message.(type) {
	case Request:
		return m.Launch != nil || m.Exec != nil
	case Reply:
		return m.Started != nil
	}
	return false
}

func encodeCompact(message any) []byte {
	b := append(make([]byte, 0, 4<<10), compactStart)
	return appendValue(binary.LittleEndian.AppendUint64(b, layout), reflect.ValueOf(message))
}

func appendValue(b []byte, v reflect.Value) []byte {
	switch v.Kind() {
	case reflect.Bool:
		return appendFlag(b, v.Bool())
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return binary.AppendVarint(b, v.Int())
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return binary.AppendUvarint(b, v.Uint())
	case reflect.String:
		return append(binary.AppendUvarint(b, uint64(v.Len())), v.String()...)
	case reflect.Pointer:
		b = appendFlag(b, !v.IsNil())
		if v.IsNil() {
			return b
		}
		return appendValue(b, v.Elem())
	case reflect.Slice, reflect.Map:
		return appendElements(b, v)
	case reflect.Struct:
		return appendFields(b, v)
	}
	panic("no compact encoding of " + v.Type().String()) // TestLayout fails for such types
}

func appendFlag(b []byte, set bool) []byte {
	if set {
		return append(b, 1)
	}
	return append(b, 0)
}

// appendElements adds the number of elements plus one, and the elements; 0 stands for nil.
func appendElements(b []byte, v reflect.Value) []byte {
	if v.IsNil() {
		return append(b, 0)
	}
	b = binary.AppendUvarint(b, uint64(v.Len())+1)
	if texts, ok := reflect.TypeAssert[[]string](v); ok { // half of a launch, so without reflection
		for _, text := range texts {
			b = append(binary.AppendUvarint(b, uint64(len(text))), text...)
		}
		return b
	}
	if v.Kind() == reflect.Slice {
		for i := range v.Len() {
			b = appendValue(b, v.Index(i))
		}
		return b
	}
	for pairs := v.MapRange(); pairs.Next(); {
		b = appendValue(appendValue(b, pairs.Key()), pairs.Value())
	}
	return b
}

func appendFields(b []byte, v reflect.Value) []byte {
	if t, ok := reflect.TypeAssert[time.Time](v); ok {
		b = appendFlag(b, !t.IsZero())
		if t.IsZero() {
			return b
		}
		return binary.AppendVarint(b, t.UnixNano())
	}
	for i := range v.NumField() {
		if f := v.Field(i); isSent(f.Type()) {
			b = appendValue(b, f)
		}
	}
	return b
}

// decodeCompact decodes a message of encodeCompact into the same type.
func decodeCompact(data []byte, message any) error {
	switch message.(type) {
	case *Request, *Reply:
	default:
		return errCompact
	}
	const start = 1 + 8
	if len(data) < start || binary.LittleEndian.Uint64(data[1:]) != layout {
		return errCompact
	}
	d := &compactDecoder{data: data[start:], text: string(data[start:])}
	d.value(reflect.ValueOf(message).Elem())
	if d.damaged || d.rest() > 0 {
		return errCompact
	}
	return nil
}

// compactDecoder decodes the rest of a message. If the rest is damaged, all further values are
// zero.
type compactDecoder struct {
	data    []byte
	text    string // the same bytes, which strings share
	at      int    // offset of the next value
	damaged bool
}

// rest returns the number of bytes that are not decoded.
func (d *compactDecoder) rest() int { return len(d.data) - d.at }

// skip goes on after n bytes. The message is damaged if n is not positive.
func (d *compactDecoder) skip(n int) {
	if n <= 0 {
		d.damaged = true
		n = d.rest()
	}
	d.at += n
}

func (d *compactDecoder) uint() uint64 {
	v, n := binary.Uvarint(d.data[d.at:])
	d.skip(n)
	return v
}

func (d *compactDecoder) int() int64 {
	v, n := binary.Varint(d.data[d.at:])
	d.skip(n)
	return v
}

func (d *compactDecoder) flag() bool { return d.uint() != 0 }

// count decodes a number of bytes or elements. Each of them takes at least one byte.
func (d *compactDecoder) count() int {
	n := d.uint()
	if n > uint64(d.rest()) {
		d.skip(0)
		return 0
	}
	return int(n)
}

func (d *compactDecoder) string() (text string) {
	if n := d.count(); n > 0 {
		text = d.text[d.at : d.at+n]
		d.skip(n)
	}
	return text
}

// elements decodes the number of elements of a slice or a map.
func (d *compactDecoder) elements() (n int, isNil bool) {
	if d.rest() > 0 && d.data[d.at] == 0 {
		d.skip(1)
		return 0, true
	}
	n = int(d.uint()) - 1
	if n < 0 || n > d.rest() {
		d.skip(0)
		return 0, true
	}
	return n, false
}

func (d *compactDecoder) value(v reflect.Value) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(d.flag())
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(d.int())
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(d.uint())
	case reflect.String:
		v.SetString(d.string())
	case reflect.Pointer:
		if d.flag() {
			v.Set(reflect.New(v.Type().Elem()))
			d.value(v.Elem())
		}
	case reflect.Slice:
		d.slice(v)
	case reflect.Map:
		d.mapping(v)
	case reflect.Struct:
		d.fields(v)
	}
}

func (d *compactDecoder) slice(v reflect.Value) {
	n, isNil := d.elements()
	if isNil {
		return
	}
	if texts, ok := v.Addr().Interface().(*[]string); ok {
		*texts = make([]string, n)
		for i := range *texts {
			(*texts)[i] = d.string()
		}
		return
	}
	v.Set(reflect.MakeSlice(v.Type(), n, n))
	for i := 0; i < n && !d.damaged; i++ {
		d.value(v.Index(i))
	}
}

func (d *compactDecoder) mapping(v reflect.Value) {
	n, isNil := d.elements()
	if isNil {
		return
	}
	t := v.Type()
	v.Set(reflect.MakeMap(t))
	for i := 0; i < n && !d.damaged; i++ {
		key, element := reflect.New(t.Key()).Elem(), reflect.New(t.Elem()).Elem()
		d.value(key)
		d.value(element)
		v.SetMapIndex(key, element)
	}
}

func (d *compactDecoder) fields(v reflect.Value) {
	if v.Type() == timeType {
		if d.flag() {
			v.Set(reflect.ValueOf(time.Unix(0, d.int())))
		}
		return
	}
	for i := range v.NumField() {
		if f := v.Field(i); isSent(f.Type()) {
			d.value(f)
		}
	}
}
