package integration

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// Values that clients send by mistake or malice.
var (
	unusualStrings = []string{"", "a", "..", "../../../etc", "/", "//", "/proc/self/fd/3", "/dev", "a\x00b", "a\nb=c", "\xff\xfe", "%s%n", "kubepods.slice",
		"-1", "0", "4294967296", "0-99999", ",", "sha256:", "2MB", "ALL", "CAP_SYS_ADMIN", "rwm", "net.ipv4.ip_forward", "unconfined", "localhost/x",
		"10.0.0.0/33", "::", strings.Repeat("x", 5000), strings.Repeat("/x", 3000)}
	unusualNumbers = []int64{0, 1, -1, 2, 3, 7, 99, 999, 1000, 65535, 65536, math.MaxInt32, math.MinInt32, math.MaxUint32, math.MaxUint32 + 1, math.MaxInt64, math.MinInt64}
)

// scramble changes some fields of a message, at any depth.
func scramble(m protoreflect.Message, r *rand.Rand) {
	fields := m.Descriptor().Fields()
	for range 1 + r.IntN(3) {
		field := fields.Get(r.IntN(fields.Len()))
		switch {
		case r.IntN(8) == 0:
			m.Clear(field)
		case field.IsMap():
			entries := m.Mutable(field).Map()
			for range r.IntN(3) {
				entries.Set(unusual(field.MapKey(), r).MapKey(), unusual(field.MapValue(), r))
			}
		case field.IsList():
			list := m.Mutable(field).List()
			for range r.IntN(4) {
				if field.Message() == nil {
					list.Append(unusual(field, r))
					continue
				}
				scramble(list.AppendMutable().Message(), r)
			}
		case field.Message() != nil:
			scramble(m.Mutable(field).Message(), r)
		default:
			m.Set(field, unusual(field, r))
		}
	}
}

// unusual returns an unusual value of a field's type. Its text is valid UTF-8, because the client refuses
// to send other text.
func unusual(field protoreflect.FieldDescriptor, r *rand.Rand) protoreflect.Value {
	number := unusualNumbers[r.IntN(len(unusualNumbers))]
	text := unusualStrings[r.IntN(len(unusualStrings))]
	switch field.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(strings.ToValidUTF8(text, "?"))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte(text))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(r.IntN(2) == 0)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(protoreflect.EnumNumber(int32(number)))
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(number))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(number))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(uint64(number))
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(float64(number))
	}
	return protoreflect.ValueOfInt64(number)
}

// TestScrambleReachesEveryField checks the fuzz tests: they change every field of every request.
func TestScrambleReachesEveryField(t *testing.T) {
	const attempts, pause = 100_000, 1000
	for _, m := range methods(t) {
		touched := map[protoreflect.FullName]bool{}
		missed := untouched(m.input.Descriptor(), nil, touched)
		for seed := uint64(0); seed < attempts && len(missed) > 0; seed++ {
			request := m.input.New()
			scramble(request, rand.New(rand.NewPCG(seed, 0)))
			note(request, touched)
			if seed%pause == pause-1 {
				missed = untouched(m.input.Descriptor(), nil, touched)
			}
		}
		if len(missed) > 0 {
			t.Errorf("%s: never changed: %v", m.name, missed)
		}
	}
}

// untouched returns the fields of a message, at any depth, that are not in touched.
func untouched(d protoreflect.MessageDescriptor, above []protoreflect.FullName, touched map[protoreflect.FullName]bool) (missed []protoreflect.FullName) {
	if slices.Contains(above, d.FullName()) {
		return nil
	}
	for i := range d.Fields().Len() {
		field := d.Fields().Get(i)
		if !touched[field.FullName()] {
			missed = append(missed, field.FullName())
		}
		if field.Message() != nil && !field.IsMap() {
			missed = append(missed, untouched(field.Message(), append(above, d.FullName()), touched)...)
		}
	}
	return missed
}

// note adds the set fields to touched.
func note(m protoreflect.Message, touched map[protoreflect.FullName]bool) {
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		touched[field.FullName()] = true
		switch {
		case field.Message() == nil || field.IsMap():
		case field.IsList():
			for i := range value.List().Len() {
				note(value.List().Get(i).Message(), touched)
			}
		default:
			note(value.Message(), touched)
		}
		return true
	})
}
