package proto

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"reflect"
	"testing"
	"time"
)

// TestLayout calculates the checksum of the types in compact messages. It fails if they have
// changed. Then the constant has to change, so that a launcher and a daemon with different types
// refuse each other's messages.
func TestLayout(t *testing.T) {
	sum := fnv.New64a()
	describe(t, sum, reflect.TypeFor[Request](), map[reflect.Type]bool{})
	describe(t, sum, reflect.TypeFor[Reply](), map[reflect.Type]bool{})
	if sum.Sum64() != layout {
		t.Errorf("the types in compact messages have changed: set layout to %#x", sum.Sum64())
	}
}

// describe writes what the encoding of a type depends on. It fails for types without an encoding.
func describe(t *testing.T, to io.Writer, of reflect.Type, known map[reflect.Type]bool) {
	t.Helper()
	fmt.Fprintln(to, of, of.Kind())
	if known[of] || of == timeType {
		return
	}
	known[of] = true
	switch of.Kind() {
	case reflect.Pointer, reflect.Slice:
		describe(t, to, of.Elem(), known)
	case reflect.Map:
		describe(t, to, of.Key(), known)
		describe(t, to, of.Elem(), known)
	case reflect.Struct:
		for f := range of.Fields() {
			if !isSent(f.Type) {
				continue
			}
			if !f.IsExported() {
				t.Errorf("the field %s of %s cannot be decoded", f.Name, of)
			}
			fmt.Fprintln(to, f.Name)
			describe(t, to, f.Type, known)
		}
	case reflect.Float32, reflect.Float64, reflect.Complex64, reflect.Complex128, reflect.Array, reflect.Chan, reflect.Func,
		reflect.Interface, reflect.Uintptr, reflect.UnsafePointer:
		t.Errorf("%s has no encoding", of)
	}
}

// fill sets all fields of a value that are sent. Each value differs.
func fill(v reflect.Value, next *int64) {
	*next++
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(-*next % 100)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*next % 100))
	case reflect.String:
		v.SetString(fmt.Sprint("text \xff\x00", *next))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), next)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(v.Index(0), next)
		fill(v.Index(1), next)
	case reflect.Map:
		key, element := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, next)
		fill(element, next)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, element)
	case reflect.Struct:
		if v.Type() == timeType {
			v.Set(reflect.ValueOf(time.Unix(*next, *next)))
			return
		}
		for i := range v.NumField() {
			if f := v.Field(i); isSent(f.Type()) {
				fill(f, next)
			}
		}
	}
}

func TestCompact(t *testing.T) {
	var next int64
	var full Request
	fill(reflect.ValueOf(&full).Elem(), &next)
	var started Reply
	fill(reflect.ValueOf(&started).Elem(), &next)
	empty := &Launch{Volumes: []Volume{}}
	for _, sent := range []any{full, started, Request{Launch: empty}, Request{Exec: &Exec{}}, Reply{Started: &Started{}}} {
		if !isCompact(sent) {
			t.Fatalf("%+v is not compact", sent)
		}
		data, err := encode(sent)
		if err != nil {
			t.Fatal(err)
		}
		got := reflect.New(reflect.TypeOf(sent))
		if err := decode(data, got.Interface()); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got.Elem().Interface(), sent) {
			t.Errorf("%+v became %+v", sent, got.Elem().Interface())
		}
		for n := range data {
			if err := decode(data[:n], reflect.New(reflect.TypeOf(sent)).Interface()); err == nil {
				t.Fatalf("%d of %d bytes are a message", n, len(data))
			}
		}
	}
}

// Another version's message, and one of another type, are refused.
func TestCompactRefuses(t *testing.T) {
	data, err := encode(Request{Launch: &Launch{ID: "a"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := decode(data, &struct{ ID string }{}); !errors.Is(err, errCompact) {
		t.Errorf("another type: %v", err)
	}
	binary.LittleEndian.PutUint64(data[1:], layout+1)
	if err := decode(data, &Request{}); !errors.Is(err, errCompact) {
		t.Errorf("another version: %v", err)
	}
}

// What a process of sessions may receive from another version stays JSON.
func TestRunningExecIsJSON(t *testing.T) {
	for _, message := range []any{Request{Kill: "a"}, Reply{Exec: &ExecStarted{PID: 1}}, Reply{Exited: &Exited{}}, Reply{Error: &Error{}}} {
		if data, err := encode(message); err != nil || data[0] != '{' {
			t.Errorf("%+v: %q, %v", message, data, err)
		}
	}
}

func FuzzCompact(f *testing.F) {
	var next int64
	var full Request
	fill(reflect.ValueOf(&full).Elem(), &next)
	for _, sent := range []any{full, Request{Exec: &Exec{}}, Reply{Started: &Started{}}} {
		f.Add(encodeCompact(sent)[9:])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		data = append(binary.LittleEndian.AppendUint64([]byte{compactStart}, layout), data...)
		var request Request
		if decode(data, &request) == nil {
			var again Request
			if err := decode(encodeCompact(request), &again); err != nil || !reflect.DeepEqual(request, again) {
				t.Fatalf("%+v became %+v, %v", request, again, err)
			}
		}
		var reply Reply
		_ = decode(data, &reply) // it must not panic
	})
}
