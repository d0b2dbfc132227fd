package source

import "golang.org/x/net/bpf"

// assembler builds a program with forward jumps to labels.
type assembler struct {
	code   []bpf.Instruction
	jumps  map[int]string // label by index of the jump instruction
	labels map[string]int
}

const (
	pass = "pass"
	drop = "drop"
)

func (a *assembler) add(code ...bpf.Instruction) { a.code = append(a.code, code...) }

func (a *assembler) label(name string) {
	if a.labels == nil {
		a.labels = map[string]int{}
	}
	a.labels[name] = len(a.code)
}

// load loads the value at an offset of the frame.
func (a *assembler) load(offset uint32, size int) {
	a.add(bpf.LoadAbsolute{Off: offset, Size: size})
}

// atLeast drops shorter frames.
func (a *assembler) atLeast(size uint32) {
	a.add(bpf.LoadExtension{Num: bpf.ExtLen}, bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: size, SkipTrue: 1})
	a.to(drop)
}

// atLeastX drops frames with fewer than size bytes after X. The frame must have at least size bytes
// in total.
func (a *assembler) atLeastX(size uint32) {
	a.add(bpf.LoadExtension{Num: bpf.ExtLen}, bpf.ALUOpConstant{Op: bpf.ALUOpSub, Val: size},
		bpf.JumpIfX{Cond: bpf.JumpGreaterOrEqual, SkipTrue: 1})
	a.to(drop)
}

// when jumps if the loaded value equals value; unless jumps if it does not. A conditional jump
// reaches 255 instructions, an unconditional jump any distance.
func (a *assembler) when(value uint32, label string) {
	a.add(bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: value, SkipTrue: 1})
	a.to(label)
}

func (a *assembler) unless(value uint32, label string) {
	a.add(bpf.JumpIf{Cond: bpf.JumpEqual, Val: value, SkipTrue: 1})
	a.to(label)
}

func (a *assembler) to(label string) {
	if a.jumps == nil {
		a.jumps = map[int]string{}
	}
	a.jumps[len(a.code)] = label
	a.add(bpf.Jump{})
}

// program resolves the labels.
func (a *assembler) program() []bpf.Instruction {
	for at, label := range a.jumps {
		to, known := a.labels[label]
		if !known || to <= at {
			panic("no label " + label + " further on")
		}
		a.code[at] = bpf.Jump{Skip: uint32(to - at - 1)}
	}
	return a.code
}
