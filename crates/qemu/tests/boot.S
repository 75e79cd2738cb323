# A guest without an operating system: counts in 256 pages, checks them, and prints the count in hex now and then.
.code16
.globl _start
_start:
 cli
 xor %ax,%ax
 mov %ax,%ds
 lgdt gdtd
 mov %cr0,%eax
 or $1,%al
 mov %eax,%cr0
 ljmp $8,$pm
.code32
pm: mov $16,%ax
 mov %ax,%ds
 mov %ax,%ss
 mov %ax,%es
 mov $0x7000,%esp
 xor %ebx,%ebx
outer:
 mov $0x1000000,%edi      # 16MB
 mov $256,%ecx            # 256 pages
1: mov (%edi),%eax
 inc %eax
 mov %eax,(%edi)
 add $4096,%edi
 dec %ecx
 jnz 1b
 # verify all equal
 mov $0x1000000,%edi
 mov (%edi),%edx
 mov $256,%ecx
2: cmp %edx,(%edi)
 jne bad
 add $4096,%edi
 dec %ecx
 jnz 2b
 inc %ebx
 test $0xff,%ebx
 jnz outer
 # print counter hex
 mov $8,%ecx
 mov (0x1000000),%eax
3: rol $4,%eax
 mov %eax,%esi
 and $15,%eax
 add $48,%al
 cmp $57,%al
 jbe 4f
 add $39,%al
4: call put
 mov %esi,%eax
 dec %ecx
 jnz 3b
 mov $10,%al
 call put
 jmp outer
put: mov %al,%ah          # waits until the last character has gone, or this one would replace it
 mov $0x3fd,%dx
5: in %dx,%al
 test $0x20,%al
 jz 5b
 mov %ah,%al
 mov $0x3f8,%dx
 out %al,%dx
 ret
bad: mov $0x3f8,%dx
 mov $'X',%al
 out %al,%dx
 hlt
.align 8
gdt: .quad 0,0x00cf9a000000ffff,0x00cf92000000ffff
gdtd: .word 23
 .long gdt
.org 510
.word 0xaa55
