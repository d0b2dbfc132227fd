// Command berth-net is berth's own network as a CNI plugin, for any runtime that executes plugins: installed as
// /opt/cni/bin/berth-net. berth itself calls it as a function.
package main

import "berth/cni/berthnet"

func main() { berthnet.Main() }
